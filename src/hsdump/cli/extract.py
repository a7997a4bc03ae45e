"""`hsdump extract`: samples through a running target, its states into a store."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import typer

from hsdump.cli.answering import AnswerOptions, answer_first, both
from hsdump.cli.options import one_of, read_template
from hsdump.cli.output import Result, emit
from hsdump.engines.base import Engine
from hsdump.errors import UsageError
from hsdump.extract.display import Display, greeting, summary
from hsdump.extract.driver import Driver
from hsdump.extract.plan import ExtractOptions, check_output, make_plan
from hsdump.extract.state import RunState
from hsdump.layers import parse_layers
from hsdump.prompts import PromptOptions
from hsdump.schema import EngineInfo
from hsdump.store import StoreWriter, WriterOptions

EPILOG = "Example:  hsdump extract chats.jsonl --server http://127.0.0.1:30000 --out /data/kimi-store"


def add_to(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(extract)


def extract(
    inputs: list[Path] = typer.Argument(..., metavar="INPUT...", help="JSONL, JSON or Parquet: chats or token ids."),
    out: Path = typer.Option(..., help="The store. Running again with the same store goes on where it stopped."),
    server: str = typer.Option(
        None, help="URL of an SGLang server started with `hsdump serve`; its key in HSDUMP_API_KEY."
    ),
    engine: str = typer.Option("sglang", help="sglang, or transformers to run the model in this process."),
    model: str = typer.Option(None, help="Model folder (tokenizer).  [default: what the server names]"),
    layers: str = typer.Option("auto", help="Which of the captured layers to store, or auto for all of them."),
    final: str = typer.Option(
        "post-norm", help="Final state: post-norm; with --engine transformers also pre-norm or both."
    ),
    max_tokens: int = typer.Option(None, min=1, help="Longer samples are skipped and counted, never cut."),
    concurrency: int = typer.Option(16, min=1, max=4096, help="Requests in flight."),
    attempts: int = typer.Option(5, min=1, max=100, help="Tries of one sample, for faults that may pass."),
    retry_failed: bool = typer.Option(False, help="Take samples again that failed in an earlier run."),
    codec: str = typer.Option("raw", help="raw, blosc2 (lossless, about 0.7 of the bytes) or fp8 (half, lossy)."),
    chat_template: Path = typer.Option(None, help="A template file to use instead of the tokenizer's."),
    turns: str = typer.Option("all", help="Assistant turns to learn: all or last."),
    thinking: str = typer.Option("keep", help="The assistant's thinking: keep, require, template, drop or refuse."),
    trust_remote_code: bool = typer.Option(False, help="Let the model's folder bring its own tokenizer code."),
    spool: Path = typer.Option(None, help="The server's spool, where it cannot be found (containers)."),
    server_wait: float = typer.Option(120.0, min=0, help="Seconds to wait for a server that went away."),
    commit_seconds: float = typer.Option(30.0, min=0.1, help="Captured samples wait at most so long for the disk."),
    generate: bool = typer.Option(False, "--generate", help="Let the target answer INPUT first; see hsdump generate."),
    n: int = typer.Option(None, "--n", min=1, help="With --generate: answers to each prompt."),
    temperature: float = typer.Option(None, min=0.0, help="With --generate: 0 is greedy; by default 1."),
    top_p: float = typer.Option(None, help="With --generate: nucleus sampling."),
    max_new_tokens: int = typer.Option(None, min=1, help="With --generate: longest answer; by default 2048."),
    seed: int = typer.Option(None, help="With --generate: repeatable answers, where the server is deterministic."),
    shard_bytes: int = typer.Option(1 << 30, min=1 << 16, help="Size at which a shard is closed."),
    json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Capture the hidden states of INPUT's samples and commit them to a store.

    Exit codes: 0 all committed, 3 some samples failed or rows were unreadable, 4 stopped early.
    """
    check_output(out)
    options = ExtractOptions(
        inputs=tuple(inputs),
        out=out,
        layers=parse_layers(layers),
        final_state=one_of("--final", final, ("post-norm", "pre-norm", "both")).replace("-", "_"),
        model=model,
        max_tokens=max_tokens,
        concurrency=concurrency if engine == "sglang" else 1,
        attempts=attempts,
        retry_failed=retry_failed,
        codec=one_of("--codec", codec, ("raw", "blosc2", "fp8")),
        shard_bytes=shard_bytes,
        commit_s=commit_seconds,
        prompts=PromptOptions(
            turns=one_of("--turns", turns, ("all", "last")),
            thinking=one_of("--thinking", thinking, ("keep", "require", "template", "drop", "refuse")),
            chat_template=read_template(chat_template),
            trust_remote_code=trust_remote_code,
        ),
    )
    answers = AnswerOptions(
        on=generate, n=n, temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens, seed=seed
    )
    options, answered = answer_first(options, answers, server, wait_s=server_wait, quiet=json)
    if answered is not None and (answered.stopped or not answered.samples["samples"]):
        raise typer.Exit(emit(both(answered, Result(data={}, text="", exit_code=0)), as_json=json))
    state = asyncio.run(_run(options, lambda: _engine(engine, server, spool, options, server_wait), quiet=json))
    result = Result(data=state.report(), text=summary(state), exit_code=state.exit_code())
    raise typer.Exit(emit(both(answered, result), as_json=json))


def _engine(name: str, server: str | None, spool: Path | None, options: ExtractOptions, wait_s: float) -> Engine:
    if name == "sglang":
        if server is None:
            raise UsageError("--server is missing", "give the server's URL: --server http://127.0.0.1:30000")
        if options.final_state != "post_norm":
            what = f"a server gives the final state post_norm, not {options.final_state}"
            raise UsageError(what, "leave --final out; `hsdump store export` converts it where needed")
        from hsdump.engines.sglang_http import SglangEngine

        key = os.environ.get("HSDUMP_API_KEY")
        return SglangEngine(server, spool=spool, api_key=key, server_wait_s=wait_s)
    if name == "transformers":
        if options.model is None:
            raise UsageError("--model is missing", "give the model folder: --engine transformers --model PATH")
        from hsdump.engines.embedded import EmbeddedEngine

        return EmbeddedEngine(options.model, layers=options.layers, final_state=options.final_state)
    raise UsageError(f"--engine {name} is not known", "use sglang or transformers")


async def _run(options: ExtractOptions, make_engine: object, *, quiet: bool) -> RunState:
    assert callable(make_engine)
    engine: Engine = make_engine()
    try:
        info: EngineInfo = await asyncio.to_thread(engine.handshake)
        if not quiet:
            typer.echo(greeting(info), err=True)
        plan = make_plan(options, info)
        writer_options = WriterOptions(shard_bytes=options.shard_bytes)
        driver = Driver(
            engine, plan, options, lambda: StoreWriter.open(options.out, plan.manifest, options=writer_options)
        )
        _stop_on_signals(driver)
        with Display(driver.state, info.spool_max_bytes, quiet=quiet).shown() as display:
            ticker = asyncio.create_task(_tick(display))
            try:
                return await driver.run()
            except asyncio.CancelledError:  # the second Ctrl-C: the report still says what there is
                return driver.state
            finally:
                ticker.cancel()
    finally:
        await engine.close()


def _stop_on_signals(driver: Driver) -> None:
    """The first Ctrl-C finishes what is in flight and commits; the second ends the run at once, still consistent."""
    loop, main_task = asyncio.get_running_loop(), asyncio.current_task()

    def on_signal() -> None:
        if driver.state.stopped and main_task is not None:
            main_task.cancel()
        driver.stop("interrupted")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)


async def _tick(display: Display) -> None:
    while True:
        await asyncio.sleep(1.0)
        display.tick()
