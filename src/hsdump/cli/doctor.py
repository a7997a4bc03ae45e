"""`hsdump doctor`: which way of attaching fits an environment, and what is in place there."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hsdump.cli.output import Result, emit
from hsdump.cli.patch import JSON, PYTHON, SITE, show_status
from hsdump.patch.doctor import Diagnosis, diagnose
from hsdump.patch.environments import find_sites
from hsdump.patch.site import find_site

EPILOG = "Example:  hsdump doctor --python /opt/sglang/bin/python"


def add_to(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(doctor)


def doctor(
    python: str = PYTHON,
    site: Path = SITE,
    search: list[Path] = typer.Option(None, help="Without --python: look below this folder, too. Repeat it."),
    json: bool = JSON,
) -> None:
    """Say which way of attaching fits an environment: plugin, patch or none; and what is in place now.

    Without --python or --site: every environment of this machine that hsdump can find.
    """
    sites = [find_site(python=python, folder=site)] if python or site else find_sites(list(search or []))
    found = [diagnose(one) for one in sites]
    text: RenderableType = Group(*map(_show, found)) if found else "no SGLang found; name one with --python or --site"
    raise typer.Exit(emit(Result(data=found, text=text), as_json=json))


def _show(found: Diagnosis) -> RenderableType:
    table = Table(show_header=False, box=None, padding=(0, 1))
    rows = {
        "fits": found.fits,
        "in place": found.in_place,
        "plugin API": "yes" if found.plugin_api else "no (it came with 0.5.11)",
        "hsdump beside it": "installed" if found.plugin_installed else "not installed",
        "general patch": f"not possible: {found.patchable}" if found.patchable else "possible",
        "native capture": "yes, as JSON and without the final state; hsdump does not use it" if found.native else "no",
        "servers": ", ".join(f"pid {process.pid} ({process.why})" for process in found.servers) or "none running",
        "next": found.next,
    }
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(value))
    return Group(show_status(found.patch), table)
