"""What `hsdump extract` does beside its own work: the probe at the start, and the decode phase."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.text import Text

from hsdump.cli.output import Result
from hsdump.cli.progress import byte_progress
from hsdump.engines.base import Engine
from hsdump.engines.handshake import server_facts
from hsdump.errors import ServerError, SpoolError, UsageError
from hsdump.extract.decode import DecodeOptions, DecodeRun
from hsdump.extract.plan import ExtractOptions
from hsdump.extract.session import Endpoint, limits_of, shake_hands
from hsdump.generate.display import counts_in_words
from hsdump.verify.probing import ProbeOptions, require_sound


def probe_servers(servers: Sequence[tuple[str, Path | None]], model: str | None, *, quiet: bool) -> None:
    """Identify what each server captures, once a server and model; a server that is not there now is left to the run.

    Raises:
        ServerError: the numbers contradict what a server's capture claims.
    """
    key = os.environ.get("HSDUMP_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for url, spool in servers:
        try:
            server_facts(url, headers)
        except ServerError:
            continue
        try:
            line = require_sound(url, ProbeOptions(model=model, spool=spool, api_key=key))
        except SpoolError as error:
            line = f"probe: can't, {error.what}"
        except ServerError as error:
            if "are not what they are said to be" in error.what:
                raise
            line = f"probe: can't, {error.what}"
        if not quiet:
            typer.echo(line, err=True)


def see_that_they_capture(engines: dict[str, Engine], options: ExtractOptions) -> None:
    """Shake hands before anything else is asked of servers that takes long.

    Raises:
        ServerError: nobody captures, or two servers would give states that may not be mixed.
    """

    async def ask() -> None:
        try:
            await shake_hands(engines, limits_of(options))
        finally:
            for engine in engines.values():
                await engine.close()

    asyncio.run(ask())


def run_decode(
    servers: Sequence[Endpoint], options: ExtractOptions, new_tokens: int, prefill_out: Path | None
) -> Result:
    """Capture decode steps from the first server.

    Raises:
        UsageError: no server.
    """
    if not servers:
        raise UsageError("--phase decode needs --server", "give the server's URL: --server http://127.0.0.1:30000")
    from hsdump.engines.sglang_http import SglangEngine

    async def run() -> DecodeRun:
        engine = SglangEngine(servers[0].url, spool=servers[0].spool, api_key=os.environ.get("HSDUMP_API_KEY"))
        work = DecodeRun(engine, options, DecodeOptions(new_tokens=new_tokens, prefill_out=prefill_out))
        try:
            with byte_progress("decode") as tick:
                await work.run(tick)
        finally:
            await engine.close()
        return work

    state = asyncio.run(run()).state
    lines = [f"{state.committed} samples of {state.tokens} tokens, {state.generated} of them from decode steps"]
    lines += [f"failed: {counts_in_words(state.failed)}", *state.details] if state.failed else []
    lines += [f"skipped: {counts_in_words(state.skipped)}"] if state.skipped else []
    lines += [f"{state.already} were there already"] if state.already else []
    return Result(data=state.report(), text=Text("\n".join(lines)), exit_code=state.exit_code)
