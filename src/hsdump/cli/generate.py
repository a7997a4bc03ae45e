"""`hsdump generate`: the target answers, and its own tokens become the samples."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from hsdump.cli.options import one_of, read_template, roles_of
from hsdump.cli.output import Result, emit
from hsdump.generate.display import summary
from hsdump.generate.options import GenerateOptions, Sampling
from hsdump.generate.run import Place, generate
from hsdump.prompts import PromptOptions
from hsdump.prompts.options import DEFAULT_DATE

EPILOG = (
    "Example:  hsdump generate prompts.jsonl --server http://127.0.0.1:30000 --out answers.parquet --temperature 0.7"
)


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("generate", epilog=EPILOG)(run)


def run(
    *,
    inputs: list[Path] = typer.Argument(
        ..., metavar="PROMPTS...", help="Prompts, or conversations whose replies are given anew; as for prepare."
    ),
    out: Path = typer.Option(..., "--out", help="Samples file for extract. The same command goes on where it stopped."),
    server: str = typer.Option(..., help="URL of any SGLang server of the target; its key in HSDUMP_API_KEY."),
    model: str | None = typer.Option(None, show_default="as served", help="Model folder (tokenizer, template)."),
    n: int = typer.Option(1, "--n", min=1, max=1000, help="Answers to each prompt."),
    temperature: float = typer.Option(1.0, min=0.0, help="0 is greedy; 1 is the model's own distribution."),
    top_p: float = typer.Option(1.0, min=0.0, max=1.0, help="Sample from the likeliest tokens of this total only."),
    top_k: int = typer.Option(-1, min=-1, help="Sample from so many likeliest tokens; -1: from all."),
    max_new_tokens: int = typer.Option(2048, min=1, help="Longest answer; longer ones are cut there and counted."),
    seed: int | None = typer.Option(None, help="Repeatable answers, where the server is deterministic."),
    max_tokens: int = typer.Option(32_768, min=2, help="Longest sample, prompt and answer together."),
    cut: str = typer.Option("keep", help="Answers cut at --max-new-tokens: keep or drop."),
    turns: str = typer.Option("all", help="Replies that the target gives anew: all, or last (the others are context)."),
    concurrency: int = typer.Option(32, min=1, max=4096, help="Requests in flight."),
    attempts: int = typer.Option(5, min=1, max=100, help="Tries of one answer, for faults that may pass."),
    retry_failed: bool = typer.Option(False, help="Ask again what failed in an earlier run."),
    server_wait: float = typer.Option(120.0, min=0, help="Seconds to wait for a server that went away."),
    control_tokens: str = typer.Option("skip", help="Rows whose text spells a control token: skip or allow."),
    chat_template: Path | None = typer.Option(None, help="Jinja file to use instead of the model's template."),
    date: str = typer.Option(DEFAULT_DATE, help="What templates print as today."),
    default_system: str | None = typer.Option(None, help="System message for rows that bring none."),
    role: list[str] = typer.Option([], help="Another role name, as NAME=assistant. Repeatable."),
    trust_remote_code: bool = typer.Option(False, "--trust-remote-code", help="Run the model's own tokenizer code."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> int:
    """Let the target answer prompts; write its tokens with exact loss masks.

    Exit codes: 0 all answered, 3 some failed or rows were unreadable, 4 stopped early.
    """
    options = GenerateOptions(
        inputs=tuple(inputs),
        out=out,
        sampling=Sampling(temperature=temperature, top_p=top_p, top_k=top_k, max_new_tokens=max_new_tokens, seed=seed),
        num_answers=n,
        replies=one_of("--turns", turns, ("all", "last")),
        cut=one_of("--cut", cut, ("keep", "drop")),
        concurrency=concurrency,
        attempts=attempts,
        retry_failed=retry_failed,
        server_wait_s=server_wait,
        prompts=PromptOptions(
            max_tokens=max_tokens,
            control_tokens=one_of("--control-tokens", control_tokens, ("skip", "allow")),
            chat_template=read_template(chat_template),
            date=date,
            default_system=default_system,
            roles=roles_of(role),
            trust_remote_code=trust_remote_code,
        ),
    )
    place = Place(url=server, api_key=os.environ.get("HSDUMP_API_KEY"), model=model)
    state = generate(options, place, quiet=as_json, say=lambda line: typer.echo(line, err=True))
    return emit(Result(data=state.report(), text=summary(state), exit_code=state.exit_code()), as_json=as_json)
