"""`hsdump status`: how far a run is, seen from another terminal."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table

from hsdump.cli.output import Result, emit
from hsdump.extract.heartbeat import IN_BETWEEN, StoreStatus, store_status

EPILOG = "Example:  hsdump status /data/kimi-store"


def add_to(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(status)


def status(
    store: Path = typer.Argument(..., help="Folder that `hsdump extract --out` writes."),
    json: bool = typer.Option(False, "--json", help="Print it as JSON."),
) -> None:
    """Say how far the run is that writes STORE, or how far the last one came. Disturbs nothing.

    Exit codes: 0 always, when there is a store.
    """
    found = store_status(store)
    raise typer.Exit(emit(Result(data=found, text=show_status(found)), as_json=json))


def show_status(found: StoreStatus) -> RenderableType:
    """Say it to a person."""
    run = found.run or {}
    table = Table(title=found.store, title_justify="left", show_header=False)
    if found.running:
        table.add_row("run", f"process {run.get('pid', '?')} on {run.get('host', '?')} since {run.get('started', '?')}")
    else:
        ended = f"the last one was seen {run['updated']}" if run else "none was noted"
        table.add_row("run", f"none is going on; {ended}")
    table.add_row("committed", f"{found.committed:,} samples, {found.tokens:,} tokens")
    between = ", ".join(f"{name} {found.states[name]}" for name in IN_BETWEEN)
    table.add_row("in between", between)
    if run:
        left = "unknown" if run.get("to_do") is None else f"{run['to_do']:,}"
        table.add_row("to do", left)
        tokens = run.get("captured_tokens", run.get("tokens", 0))  # commits come in strides
        table.add_row("rate", f"{tokens / max(run.get('seconds', 0), 1e-9):,.0f} tokens/s in this run")
        if run.get("disk_free") is not None:
            table.add_row("disk", f"{decimal(run['disk_free'])} free")
        for lane in run.get("servers", []):
            table.add_row(lane["name"], f"{lane['status']}, {lane['in_flight']} in flight, {lane['tokens']:,} tokens")
        if run.get("stopped"):
            table.add_row("[red]stopped", str(run["stopped"]))
        elif not found.running and any(found.states[name] for name in IN_BETWEEN):
            what = "without a last word, as after kill -9 or a power failure"
            table.add_row("[red]ended", f"{what}: run the same command again to go on")
    for reason, count in sorted(found.failed.items()):
        table.add_row(f"[red]failed: {reason}", f"{count}")
    for reason, count in sorted(found.skipped.items()):
        table.add_row(f"[yellow]skipped: {reason}", f"{count}")
    return table
