"""From options to a samples file: what `hsdump generate` and `hsdump extract --generate` share."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from hsdump._version import __version__
from hsdump.errors import InputError
from hsdump.generate.display import live_panel
from hsdump.generate.driver import Generator
from hsdump.generate.journal import Journal
from hsdump.generate.making import write_samples
from hsdump.generate.options import GenerateOptions
from hsdump.generate.server import AnswerServer, Served
from hsdump.generate.state import GenerateState
from hsdump.live import LivePanel
from hsdump.prompts import Renderer
from hsdump.prompts.inputs import check_input


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the answers come from."""

    url: str
    api_key: str | None
    model: str | None
    """Where tokenizer and template are read; None: what the server names."""


def generate(options: GenerateOptions, place: Place, *, quiet: bool, say: Callable[[str], None]) -> GenerateState:
    """Ask everything that is not answered yet, and write the samples file and its report.

    Args:
        options: what to ask, and how.
        place: of the target.
        quiet: no display.
        say: gets one line about the server before the first question.

    Returns:
        What was done; its `exit_code` is the command's.

    Raises:
        HsdumpError: nothing could be asked at all, or nothing was there to ask.
    """
    for path in options.inputs:
        check_input(path)
    state = asyncio.run(_run(options, place, quiet=quiet, say=say))
    if not state.samples["samples"] and not (state.stopped or state.failed or state.earlier_failures):
        left_out = state.skipped + Counter({"cut-dropped": state.samples["cut-dropped"]})
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in left_out.most_common()) or "no rows"
        lines = [f"0 samples from {state.rows} rows ({reasons})"]
        lines += [f"  {found[0]['source']}: {found[0]['detail']}" for found in state.examples.values()]
        raise InputError("\n".join(lines), "see the reasons above; rows are named by file and line")
    report = options.out.with_name(options.out.name + ".report.json")
    state.ended_s = time.monotonic()
    report.write_bytes(msgspec.json.format(msgspec.json.encode(state.report()), indent=2))
    return state


async def _run(options: GenerateOptions, place: Place, *, quiet: bool, say: Callable[[str], None]) -> GenerateState:
    server = AnswerServer(place.url, api_key=place.api_key, wait_s=options.server_wait_s)
    try:
        served = await asyncio.to_thread(server.greet)
        limit = min(options.prompts.max_tokens, served.max_tokens or options.prompts.max_tokens)
        options = replace(options, prompts=replace(options.prompts, max_tokens=limit))
        renderer = Renderer.load(place.model or served.model_path, options.prompts)
        say(f"hsdump: SGLang {served.version} serves {served.model_path}; at most {limit:,} tokens a sample")
        made_by = _made_by(options, served, renderer)
        state = GenerateState(
            settings={**made_by, "inputs": [str(path) for path in options.inputs], "cut": options.cut},
            rows_expected=count_rows(options.inputs),
            per_question=options.num_answers,
        )
        journal = Journal(options.answers_path, made_by, secrets.token_hex(4))
        try:
            generator = Generator(server, renderer, options, journal, state)
            with live_panel(state, quiet=quiet).shown() as display:
                _stop_on_signals(generator, display)
                ticker = asyncio.create_task(_tick(display))
                try:
                    await generator.run()
                except asyncio.CancelledError:
                    pass  # the second Ctrl-C: what came is kept, and the report still says what there is
                finally:
                    ticker.cancel()
            write_samples(journal, options, {**state.settings, "hsdump_version": __version__}, state)
        finally:
            journal.close()
    finally:
        await server.close()
    return state


def _made_by(options: GenerateOptions, served: Served, renderer: Renderer) -> dict[str, object]:
    """Give everything under which answers may stand in one file, and what a samples file says of its making."""
    return {
        "model": served.model_path,
        "tokenizer_digest": renderer.tokenizer_digest,
        "template_digest": renderer.template_digest,
        "date": options.prompts.date,
        **options.identity(),
    }


def _stop_on_signals(generator: Generator, display: LivePanel) -> None:
    """The first Ctrl-C waits for the answers in flight; the second ends the run at once, still consistent."""
    loop, main_task = asyncio.get_running_loop(), asyncio.current_task()

    def on_signal() -> None:
        if generator.state.stopped and main_task is not None:
            main_task.cancel()
        else:
            display.say(f"hsdump: stopping when {generator.state.in_flight} conversations are answered; again: at once")
        generator.stop("interrupted")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)


async def _tick(display: LivePanel) -> None:
    while True:
        await asyncio.sleep(1.0)
        display.tick()


def count_rows(inputs: tuple[Path, ...]) -> int | None:
    """Count the rows of JSONL files by their line ends, for an ETA; None when another format is among them."""
    total = 0
    for path in inputs:
        if path.suffix != ".jsonl":
            return None
        with path.open("rb") as file:
            total += sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    return total
