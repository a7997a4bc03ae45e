"""`hsdump probe`: which physical tensor is each layer that a server captures?"""

from __future__ import annotations

import os
from pathlib import Path

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hsdump.cli.options import one_of
from hsdump.cli.output import Result, emit
from hsdump.verify.probe import ProbeReport
from hsdump.verify.probing import ProbeOptions, probe_server

EPILOG = "Example:  hsdump probe --server http://127.0.0.1:30000 --depth all"


def add_to(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(probe)


def probe(
    server: str = typer.Option(..., help="URL of a server with capture on; its key in HSDUMP_API_KEY."),
    model: str = typer.Option(None, show_default="where the server read it", help="The served checkpoint's folder."),
    depth: str = typer.Option("ends", help="ends: only the layers below the lowest and above the highest; or all."),
    fresh: bool = typer.Option(False, help="Probe again although this very server was probed before."),
    spool: Path = typer.Option(None, help="The server's spool, where it cannot be found (containers)."),
    json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Identify each captured state by numbers: embedding rows, the checkpoint's own layers, norm and head.

    Three sequences of 24 tokens are captured; of the checkpoint, only the needed layers are read, one at a time.

    Exit codes: 0 agrees with what the capture claims, 1 contradicts it, 2 can't (and why).
    """
    options = ProbeOptions(
        model=model,
        depth=one_of("--depth", depth, ("ends", "all")),
        spool=spool,
        api_key=os.environ.get("HSDUMP_API_KEY"),
        fresh=fresh,
    )
    report = probe_server(server, options)
    raise typer.Exit(emit(Result(data=report, text=_show(report), exit_code=report.exit_code), as_json=json))


def _show(report: ProbeReport) -> RenderableType:
    colour = {0: "green", 1: "red"}.get(report.exit_code, "yellow")
    head = Text(f"{report.engine} {report.model_class}, {report.num_layers} layers: ")
    head.append(report.verdict, style=f"bold {colour}")
    head.append(" (remembered from an earlier probe of this server)" if report.cached else "")
    table = Table(title="what each state is, as an index into transformers' hidden_states", title_justify="left")
    for name in ("state", "claimed", "found", "error", "runner-up", "how"):
        table.add_column(name, overflow="fold")
    for one in report.states:
        error = "" if one.error is None else f"{one.error:.2g}"
        second = "" if one.runner_up_error is None else f"{one.runner_up} ({one.runner_up_error:.2g})"
        style = "" if one.found == one.claimed else "red"
        table.add_row(one.state, one.claimed, Text(one.found or "?", style), error, second, one.how)
    parts: list[RenderableType] = [head, *(Text(f"- {words}") for words in report.words), table]
    if report.engine_ids:
        ids = ",".join(map(str, report.engine_ids))
        parts.append(Text(f"this engine's own ids for these layers, for a drafter's config too: {ids}"))
        parts.append(Text(f"there, {report.id_meaning}; hsdump's built-in table says {report.table_ids}"))
    if report.logits is not None:
        parts.append(Text(report.logits.summary))
    parts.append(Text(f"layers of the checkpoint that were read: {report.layers_read}", style="dim"))
    return Group(*parts)
