"""`hsdump compare`: how far apart are two captures of the same tokens?"""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hsdump.cli.output import Result, emit
from hsdump.cli.progress import byte_progress
from hsdump.verify.compare import CompareReport, compare_stores

EPILOG = "Example:  hsdump compare /data/from-sglang /data/from-transformers --html compare.html"


def add_to(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(compare)


def compare(
    store_a: Path = typer.Argument(..., help="One store."),
    store_b: Path = typer.Argument(..., help="Another, with the same tokens: the one to measure against."),
    samples: int = typer.Option(None, min=1, help="Look at this many of the common samples only."),
    seed: int = typer.Option(0, help="Which samples --samples chooses."),
    html: Path = typer.Option(None, help="Write a page with plots (needs the extra report of hsdump)."),
    json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Compare two engines, versions, settings, codecs or phases by their states, sample by sample.

    Exit codes: 0 the same up to rounding, 1 different or nothing in common.
    """
    if html is not None:
        from hsdump.verify.page import check_plotly

        check_plotly()
    with byte_progress("compare") as tick:
        report = compare_stores(store_a, store_b, samples=samples, seed=seed, progress=tick)
    if html is not None:
        from hsdump.verify.page import write_page

        write_page(report, html)
    raise typer.Exit(emit(Result(data=report, text=_show(report), exit_code=report.exit_code), as_json=json))


def _show(report: CompareReport) -> RenderableType:
    head = Text(f"A {report.store_a}\nB {report.store_b}\n")
    head.append(report.verdict, style="bold green" if report.exit_code == 0 else "bold red")
    head.append(f": {report.samples} samples, {report.tokens} tokens in both")
    if report.sampled_of is not None:
        head.append(f" (of {report.sampled_of} in common)", style="bold yellow")
    if report.only_a or report.only_b:
        head.append(f"; {report.only_a} only in A, {report.only_b} only in B")
    parts: list[RenderableType] = [head, *(Text(f"- {words}") for words in report.words)]
    if report.states:
        parts.append(_states(report))
    if any(diff.prompt is not None and diff.generated is not None for diff in report.states):
        parts.append(_parts(report))
    if report.off_samples:
        parts.append(_samples(report))
    parts += [Text(f"fact {fact}", style="dim") for fact in report.facts]
    return Group(*parts)


def _states(report: CompareReport) -> Table:
    table = Table(title="relative error of rows", title_justify="left")
    for name in ("state", "rows", "median", "p99", "worst", "cosine", "off", "closest in B"):
        table.add_column(name, justify="left" if name in ("state", "closest in B") else "right")
    for diff in report.states:
        errors = (f"{value:.2g}" for value in (diff.median, diff.p99, diff.worst))
        closest = "" if diff.best_match == diff.state else f"{diff.best_match} ({diff.best_match_error:.2g})"
        table.add_row(diff.state, str(diff.rows), *errors, f"{diff.cosine:.4f}", str(diff.off_rows), closest)
    return table


def _parts(report: CompareReport) -> Table:
    table = Table(title="median relative error by part of the sample", title_justify="left")
    for name in ("state", "context", "learned (in a decode store: generated)"):
        table.add_column(name, justify="left" if name == "state" else "right")
    for diff in report.states:
        table.add_row(
            diff.state, *(f"{part:.2g}" if part is not None else "" for part in (diff.prompt, diff.generated))
        )
    return table


def _samples(report: CompareReport) -> Table:
    table = Table(title=f"samples that differ ({report.off_count})", title_justify="left")
    for name in ("sample", "state", "rows", "off", "where they are"):
        table.add_column(name, overflow="fold")
    for diff in report.off_samples[:10]:
        rows = f"{diff.first}..{diff.last} of {diff.rows}"
        table.add_row(f"{diff.sample} {diff.source}", diff.state, rows, str(diff.off_rows), "; ".join(diff.moves))
    return table
