"""`hsdump detach`: undo whatever attaches hsdump to an environment, and prove it."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.text import Text

from hsdump.cli.output import Result, emit
from hsdump.cli.patch import CHECK, FORCE, JSON, PYTHON, SITE
from hsdump.patch.doctor import detach as detach_site
from hsdump.patch.restore import RestoreOptions
from hsdump.patch.site import find_site

EPILOG = "Example:  hsdump detach --python /opt/sglang/bin/python"


def add_to(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(detach)


def detach(
    python: str = PYTHON,
    site: Path = SITE,
    uninstall: bool = typer.Option(False, help="Uninstall the plugin, too."),
    keep_edits: bool = typer.Option(False, help="As for `hsdump patch restore`."),
    without_backup: bool = typer.Option(False, help="As for `hsdump patch restore`."),
    import_check: bool = CHECK,
    force: bool = FORCE,
    json: bool = JSON,
) -> None:
    """Restore a patched source, sweep spools of dead servers, and prove that nothing of hsdump is at work."""
    options = RestoreOptions(
        keep_edits=keep_edits, without_backup=without_backup, import_check=import_check, force=force
    )
    done = detach_site(find_site(python=python, folder=site), options, uninstall=uninstall)
    lines = [*(done.undone or ["nothing had to be undone"]), *(f"  {proof}" for proof in done.proofs)]
    raise typer.Exit(emit(Result(data=done, text=Text("\n".join(lines))), as_json=json))
