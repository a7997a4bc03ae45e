"""`hsdump verify`: is this store what was captured?"""

from __future__ import annotations

from pathlib import Path

import typer

from hsdump.cli.output import Result, emit
from hsdump.cli.progress import byte_progress
from hsdump.errors import StoreCorrupt
from hsdump.verify import VerifyOptions, verify_store
from hsdump.verify.show import show_report

EPILOG = "Example:  hsdump verify /data/kimi-store"


def add_to(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(verify)


def verify(
    store: Path = typer.Argument(..., help="Folder that `hsdump extract --out` wrote."),
    sample: int = typer.Option(None, min=1, help="Look at this many samples only; the report says so."),
    seed: int = typer.Option(0, help="Which samples --sample chooses."),
    json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Check bytes, shapes, numbers and agreement of a store. Changes nothing.

    Exit codes: 0 clean, 1 suspicious, 2 corrupt.
    """
    options = VerifyOptions(sample=sample, seed=seed)
    with byte_progress("verify", None if sample else _bytes_to_read(store)) as tick:
        report = verify_store(store, options, tick)
    code = emit(Result(data=report, text=show_report(report), exit_code=report.exit_code), as_json=json)
    raise typer.Exit(code)


def _bytes_to_read(path: Path) -> int | None:
    from hsdump.store import Store

    try:
        with Store(path) as store:
            return sum(shard.num_bytes for shard in store.shards())
    except StoreCorrupt:
        return None  # `verify_store` says what it is
