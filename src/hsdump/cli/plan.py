"""`hsdump plan`: what a capture will need, before anything starts."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path

import typer
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hsdump.cli.options import one_of, read_template
from hsdump.cli.output import Result, emit
from hsdump.engines.base import CaptureRequest
from hsdump.engines.sglang_http import SglangEngine
from hsdump.errors import UsageError
from hsdump.extract.estimate import Census, Estimate, Room, estimate, free_bytes, shm_free_bytes
from hsdump.extract.model_facts import read_model_facts
from hsdump.layers import parse_layers
from hsdump.prompts import PromptOptions, Renderer, Skip, read_samples
from hsdump.samples import TokenSample
from hsdump.schema import DTYPE_BYTES, EngineInfo, StateShape

EPILOG = (
    "Examples:  hsdump plan chats.jsonl --model /models/Qwen3-8B --out /data/store --tokens-per-s 20000\n\n"
    "hsdump plan --tokens 17300000 --samples 10000 --hidden-size 7168 --states 4 --dtype bfloat16 --json"
)

DOES_NOT_FIT = 1
MEASURED_SAMPLES = 32
"""Captured from the server to measure its prefill rate; nothing of them is kept."""


def add_to(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(plan)


def plan(
    inputs: list[Path] = typer.Argument(None, metavar="[INPUT...]", help="What extract would read."),
    model: str = typer.Option(None, help="Model folder: tokenizer, template, sizes."),
    layers: str = typer.Option("auto", help="Auxiliary layers, or auto for EAGLE-3's three."),
    codec: str = typer.Option("raw", help="raw, blosc2 or fp8."),
    out: Path = typer.Option(None, help="Where the store will lie; its disk is looked at."),
    server: str = typer.Option(None, help="Ask this server what it captures, and measure its prefill rate."),
    spool: Path = typer.Option(None, help="That server's spool, where it cannot be found."),
    tokens_per_s: float = typer.Option(None, min=0.001, help="Prefill rate, when it is known."),
    tokens: int = typer.Option(None, min=1, help="Without INPUT: tokens in all."),
    samples: int = typer.Option(None, min=1, help="Without INPUT: samples."),
    hidden_size: int = typer.Option(None, min=1, help="Without a model: width of a state."),
    states: int = typer.Option(4, min=1, help="Without a model: states a token, the final one included."),
    dtype: str = typer.Option("bfloat16", help="Without a model: bfloat16, float16 or float32."),
    max_tokens: int = typer.Option(None, min=1, show_default="the context", help="Longer samples are left out."),
    concurrency: int = typer.Option(16, min=1, help="Requests in flight, for the recommended spool."),
    disk_reserve: int = typer.Option(1 << 30, min=0, help="Bytes of the disk that extract leaves free."),
    chat_template: Path = typer.Option(None, help="A template file to use instead of the tokenizer's."),
    json: bool = typer.Option(False, "--json", help="Print the plan as JSON."),
) -> None:
    """Say what a capture needs: samples, tokens, bytes by codec, disk, spool, time, and whether it fits.

    Exit codes: 0 it fits, 1 it does not (the plan says what to change).
    """
    one_of("--codec", codec, ("raw", "blosc2", "fp8"))
    wanted = parse_layers(layers)
    if server is not None:
        asked = _Asked.of_server(server, spool, wanted)
    elif model is not None:
        facts = read_model_facts(model, wanted)
        asked = _Asked(shape=facts.shape, context=facts.context_length, vocab_size=facts.vocab_size)
    else:
        asked = _Asked(shape=_given_shape(hidden_size, states, dtype))
    if inputs:
        options = PromptOptions(
            max_tokens=min(max_tokens or asked.context or 1 << 20, asked.context or 1 << 20),
            vocab_size=asked.vocab_size,
            chat_template=read_template(chat_template),
        )
        tokenizer = model or asked.model_path
        renderer = Renderer.load(tokenizer, options) if tokenizer else None
        census, first = _read(read_samples(inputs, renderer, options), keep=MEASURED_SAMPLES if server else 0)
    elif tokens and samples:
        census, first = Census.given(samples, tokens), []
    else:
        raise UsageError("there is nothing to plan", "name the input, or give --tokens and --samples")
    if server and first and tokens_per_s is None:
        tokens_per_s = _measure(server, spool, first)
    room = Room(
        disk_free=free_bytes(out) if out else None,
        disk_reserve=disk_reserve,
        shm_free=shm_free_bytes(),
        context_length=asked.context,
        spool_bytes=asked.spool_bytes,
        tokens_per_s=tokens_per_s,
        concurrency=concurrency,
    )
    found = estimate(census, asked.shape, codec, room)
    code = 0 if found.fits else DOES_NOT_FIT
    raise typer.Exit(emit(Result(data=found, text=show_estimate(found), exit_code=code), as_json=json))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What model or server say about the states."""

    shape: StateShape
    context: int | None = None
    vocab_size: int | None = None
    spool_bytes: int | None = None
    model_path: str | None = None

    @classmethod
    def of_server(cls, url: str, spool: Path | None, layers: tuple[int, ...] | None) -> _Asked:
        async def ask() -> EngineInfo:
            engine = _engine(url, spool)
            try:
                return await asyncio.to_thread(engine.handshake)
            finally:
                await engine.close()

        info = asyncio.run(ask())
        missing = sorted(set(layers or ()) - set(info.shape.layers))
        if missing:
            raise UsageError(
                f"the server captures layers {list(info.shape.layers)}, so {missing} are not to be had from it",
                "leave --layers out, or start the server with other --layers",
            )
        shape = StateShape(
            layers=layers or info.shape.layers,
            hidden_size=info.shape.hidden_size,
            dtype=info.shape.dtype,
            final_state=info.shape.final_state,
        )
        return cls(
            shape=shape,
            context=info.context_length,
            vocab_size=info.vocab_size,
            spool_bytes=info.spool_max_bytes,
            model_path=info.model_path,
        )


def _engine(url: str, spool: Path | None) -> SglangEngine:
    return SglangEngine(url, spool=spool, api_key=os.environ.get("HSDUMP_API_KEY"))


def _given_shape(hidden_size: int | None, states: int, dtype: str) -> StateShape:
    if hidden_size is None:
        raise UsageError("the size of a state is not known", "name the model with --model, or give --hidden-size")
    one_of("--dtype", dtype, tuple(DTYPE_BYTES))
    return StateShape(layers=tuple(range(1, states)), hidden_size=hidden_size, dtype=dtype, final_state="post_norm")


def _read(rows: Iterator[TokenSample | Skip], keep: int) -> tuple[Census, list[TokenSample]]:
    """Count the input; a spinner says how far it is."""
    census = Census()
    first: list[TokenSample] = []
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.fields[samples]:,} samples read"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("read", total=None, samples=0)
        for item in rows:
            census.add(item)
            if isinstance(item, TokenSample) and len(first) < keep:
                first.append(item)
            if census.samples % 64 == 0:
                bar.update(task, samples=census.samples)
    return census, first


def _measure(url: str, spool: Path | None, samples: Iterable[TokenSample]) -> float:
    """Capture a few samples, throw their states away, and give tokens a second."""

    async def run() -> float:
        engine = _engine(url, spool)
        await asyncio.to_thread(engine.handshake)

        async def one(sample: TokenSample) -> int:
            captured = await engine.capture(CaptureRequest(key=sample.key, input_ids=sample.input_ids, attempt=0))
            captured.release()
            return len(sample.input_ids)

        try:
            started_s = time.monotonic()
            done = await asyncio.gather(*(one(sample) for sample in islice(samples, MEASURED_SAMPLES)))
            return sum(done) / (time.monotonic() - started_s)
        finally:
            await engine.close()

    return asyncio.run(run())


def show_estimate(found: Estimate) -> RenderableType:
    """Say it to a person."""
    table = Table(title="plan", title_justify="left", show_header=False)
    table.add_row("samples", f"{found.samples:,}, longest {found.longest:,} tokens")
    table.add_row("tokens", f"{found.tokens:,} at {found.bytes_per_token:,} bytes of states each")
    if found.over_context:
        table.add_row("over the context", f"{found.over_context:,} samples: skipped, never cut")
    for reason, count in found.skips.items():
        table.add_row(f"skipped: {reason}", f"{count:,}")
    for name, size in found.bytes_by_codec.items():
        table.add_row(f"store as {name}", f"{decimal(size)}{'  <-' if name == found.codec else ''}")
    free = f", {decimal(found.disk_free)} free" if found.disk_free is not None else " (name the place with --out)"
    table.add_row("disk", f"{decimal(found.disk_needed)} with the reserve{free}")
    spool = f"at least {decimal(found.spool_minimum)}, better {decimal(found.spool_recommended)}"
    table.add_row("spool", f"{spool}; {decimal(found.shm_free)} free in shared memory here")
    if found.seconds is not None:
        table.add_row("time", f"{timedelta(seconds=round(found.seconds))} at {found.tokens_per_s:,.0f} tokens/s")
    else:
        table.add_row("time", "unknown: give --tokens-per-s, or measure with --server")
    parts: list[RenderableType] = [table]
    if sum(found.histogram.values()) and len(found.histogram) > 1:
        most = max(found.histogram.values())
        bars = Table("tokens", "samples", "", box=None, pad_edge=False)
        for name, count in found.histogram.items():
            bars.add_row(name, f"{count:,}", "#" * max(round(40 * count / most), count > 0))
        parts.append(bars)
    if not found.fits:
        parts.append(Text("it does not fit", style="red"))
    elif found.disk_free is None:
        parts.append(Text("it fits, except that no disk was named: --out says where", style="yellow"))
    else:
        parts.append(Text("it fits", style="green"))
    parts += [Text(f"- {problem}", style="red") for problem in found.problems]
    return Group(*parts)
