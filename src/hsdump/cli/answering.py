"""`hsdump extract --generate`: the answers first, in a samples file beside the store, then their states."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import typer
from rich.console import Group, RenderableType

from hsdump.cli.output import Result
from hsdump.errors import UsageError
from hsdump.extract.plan import ExtractOptions
from hsdump.generate.display import summary
from hsdump.generate.options import GenerateOptions, Sampling
from hsdump.generate.run import Place, generate
from hsdump.generate.state import GenerateState


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions:
    """What `extract` takes for `--generate`; None: not given."""

    on: bool
    n: int | None
    temperature: float | None
    top_p: float | None
    max_new_tokens: int | None
    seed: int | None

    def given(self) -> dict[str, object]:
        """Give the options that were set, by their names on the command line."""
        named = {
            "--n": self.n,
            "--temperature": self.temperature,
            "--top-p": self.top_p,
            "--max-new-tokens": self.max_new_tokens,
            "--seed": self.seed,
        }
        return {name: value for name, value in named.items() if value is not None}

    def sampling(self) -> Sampling:
        """Give what `hsdump generate` would use with these options."""
        default = Sampling()
        return Sampling(
            temperature=default.temperature if self.temperature is None else self.temperature,
            top_p=default.top_p if self.top_p is None else self.top_p,
            max_new_tokens=self.max_new_tokens or default.max_new_tokens,
            seed=self.seed,
        )


def answer_first(
    options: ExtractOptions, answers: AnswerOptions, server: str | None, *, wait_s: float, quiet: bool
) -> tuple[ExtractOptions, GenerateState | None]:
    """Let the target answer the input, if that was asked for.

    Returns:
        The options with the samples file as their input, and what was done; options as they are without `--generate`.

    Raises:
        UsageError: options of `--generate` without it, or no server to ask.
    """
    if not answers.on:
        if answers.given():
            raise UsageError(f"{', '.join(answers.given())} without --generate", "add --generate, or leave them out")
        return options, None
    if server is None:
        raise UsageError("--generate needs --server", "give the server's URL: --server http://127.0.0.1:30000")
    asked = GenerateOptions(
        inputs=options.inputs,
        out=samples_path(options.out),
        sampling=answers.sampling(),
        num_answers=answers.n or 1,
        replies=options.prompts.turns,
        concurrency=options.concurrency,
        attempts=options.attempts,
        retry_failed=options.retry_failed,
        server_wait_s=wait_s,
        prompts=replace(options.prompts, max_tokens=options.max_tokens or options.prompts.max_tokens),
    )
    place = Place(url=server, api_key=os.environ.get("HSDUMP_API_KEY"), model=options.model)
    state = generate(asked, place, quiet=quiet, say=lambda line: None if quiet else typer.echo(line, err=True))
    prompts = replace(options.prompts, turns="all")  # which turns are learned is settled now
    return replace(options, inputs=(asked.out,), prompts=prompts), state


def samples_path(store: Path) -> Path:
    """Say where the answers to a store's questions are: beside it, so that they outlive it."""
    return store.with_name(f"{store.name}.generated.parquet")


def both(answered: GenerateState | None, result: Result) -> Result:
    """Put what became of the questions before what became of the samples."""
    if answered is None:
        return result
    text: RenderableType = Group(summary(answered), result.text)
    data = {**result.data, "exit_code": max(answered.exit_code(), result.exit_code), "generate": answered.report()}
    return Result(data=data, text=text, exit_code=data["exit_code"])
