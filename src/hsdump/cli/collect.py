"""`hsdump collect`: the far end of an extract, beside a server on another host."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import typer

from hsdump.errors import UsageError
from hsdump.extract.collector import Collector
from hsdump.extract.collector_http import serving
from hsdump.extract.plan import check_output

EPILOG = (
    "Example:  HSDUMP_COLLECT_TOKEN=... hsdump collect --server http://127.0.0.1:30000 --out /data/part-1 "
    "--listen 10.0.0.5:7070"
)


def add_to(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(collect)


def collect(
    server: str = typer.Option(..., help="URL of the SGLang server on this host, started with `hsdump serve`."),
    out: Path = typer.Option(..., help="The partition to write here; join partitions with `hsdump store merge`."),
    listen: str = typer.Option("127.0.0.1:7070", help="Address and port for the driver: loopback or private."),
    spool: Path = typer.Option(None, help="The server's spool, where it cannot be found (containers)."),
) -> None:
    """Capture here what `hsdump extract --collector` sends, until Ctrl-C. States do not leave this host.

    The token that both sides share is read from HSDUMP_COLLECT_TOKEN. Exit codes: 0 after Ctrl-C.
    """
    check_output(out)
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"--listen {listen} is not ADDRESS:PORT", "for instance --listen 127.0.0.1:7070")
    token = os.environ.get("HSDUMP_COLLECT_TOKEN", "")
    asyncio.run(_serve(server, out, spool, (host.strip("[]"), int(port)), token))


async def _serve(url: str, out: Path, spool: Path | None, address: tuple[str, int], token: str) -> None:
    collector = Collector(url, out, spool=spool, api_key=os.environ.get("HSDUMP_API_KEY"))
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    with serving(collector, *address, token) as port:
        typer.echo(f"hsdump: collecting from {url} into {out}, listening at {address[0]}:{port}", err=True)
        watcher = asyncio.create_task(collector.watch())
        await ended.wait()
        watcher.cancel()
        await collector.close()
