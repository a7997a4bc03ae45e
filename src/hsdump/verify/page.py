"""A comparison as one HTML page with plots, readable without a network."""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import Any

from hsdump.errors import UsageError
from hsdump.verify.compare import CompareReport
from hsdump.verify.differ import SampleDiff
from hsdump.verify.rows import SAME_SAMPLE

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #223 }
h1 { margin-bottom: .3rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; margin: .5rem 0 } dd { margin: 0 }
dd, .id { overflow-wrap: anywhere }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 14px }
td, th { padding: .2rem 1.2rem .2rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e3e6ec }
.number { text-align: right; font-variant-numeric: tabular-nums } .id { font-family: ui-monospace, monospace }
.note { color: #667 } .same { color: #187a58 } .different { color: #c22 }
"""

FLOOR, CEILING = 1e-5, 10.0
"""Errors are drawn between these: zero has no place on a logarithmic axis, and infinity on none."""

NUMBERED = 16
"""States up to which the matrix has its numbers written into it."""


def check_plotly() -> None:
    """Find out before the work begins whether a page can be made.

    Raises:
        UsageError: plotly is not installed.
    """
    try:
        import plotly  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise UsageError("--html needs plotly", 'pip install "hsdump[report]", or leave --html out') from error


def write_page(report: CompareReport, path: Path) -> None:
    """Write the page.

    Raises:
        UsageError: the path cannot be written.
    """
    plots = []
    if report.states:
        figures = {
            "Relative error of rows by state": _by_state(report),
            "Median relative error by position in the sample": _by_position(report),
            "Which state of B is each state of A?": _matrix(report),
        }
        for index, (title, figure) in enumerate(figures.items()):
            figure.update_layout(template="plotly_white", margin={"t": 20, "b": 50, "l": 80, "r": 20})
            plot = figure.to_html(
                full_html=False,
                include_plotlyjs=index == 0,
                default_height="24rem",
                config={"displayModeBar": False, "responsive": True},
            )
            plots.append(f"<h2>{title}</h2>{plot}")
    text = _head(report) + _table(report) + "".join(plots) + _samples(report) + _facts(report)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--html {path} cannot be written: {error.strerror}", "name a file in a folder of yours"
        ) from error


def _head(report: CompareReport) -> str:
    words = "".join(f"<li>{html.escape(text)}</li>" for text in report.words)
    kind = "same" if report.exit_code == 0 else "different"
    some = f" (of {report.sampled_of} in common)" if report.sampled_of is not None else ""
    return (
        '<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">'
        f"<title>hsdump compare: {html.escape(report.verdict)}</title><style>{_STYLE}</style>"
        f"<h1 class={kind}>{html.escape(report.verdict)}</h1>"
        f"<dl><dt>A<dd>{html.escape(report.store_a)}<dt>B<dd>{html.escape(report.store_b)}"
        f"<dt>in both<dd>{report.samples:,} samples{some}, {report.tokens:,} tokens; "
        f"{report.only_a:,} only in A, {report.only_b:,} only in B</dl><ul>{words}</ul>"
    )


def _table(report: CompareReport) -> str:
    if not report.states:
        return ""
    names = ("rows", "all rows", "median", "99 %", "worst", "context", "learned", "cosine", "rows off")
    head = "<th>state" + "".join(f"<th class=number>{name}" for name in names) + "<th>closest in B"
    rows = []
    for diff in report.states:
        parts = [_short(part) for part in (diff.error, diff.median, diff.p99, diff.worst, diff.prompt, diff.generated)]
        numbers = (f"{diff.rows:,}", *parts, f"{diff.cosine:.4f}", f"{diff.off_rows:,}")
        cells = "".join(f"<td class=number>{number}" for number in numbers)
        closest = f"{diff.best_match} ({_short(diff.best_match_error)})"
        style = "" if diff.best_match == diff.state else " class=different"
        rows.append(f"<tr><td>{html.escape(diff.state)}{cells}<td{style}>{html.escape(closest)}")
    note = (
        "Relative errors |A - B| / |B|; median, 99 % and worst are of single rows, context and learned the medians "
        "before and within the tokens that are learned from."
    )
    return f"<div class=wide><table><tr>{head}{''.join(rows)}</table></div><p class=note>{note}</p>"


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.2g}"


def _drawn(errors: list[float]) -> list[float]:
    return [min(max(error, FLOOR), CEILING) for error in errors]


def _limits(figure: Any) -> None:
    """Draw the axis and the limit that samples are judged by."""
    figure.update_yaxes(type="log", title="relative error", dtick=1, exponentformat="power")
    figure.add_hline(SAME_SAMPLE, line={"dash": "dash", "color": "#c22", "width": 1})
    place = {"x": 0, "xref": "paper", "xanchor": "left", "y": math.log10(SAME_SAMPLE), "yanchor": "bottom"}
    figure.add_annotation(text="more than rounding", showarrow=False, font={"color": "#c22", "size": 11}, **place)


def _by_state(report: CompareReport) -> Any:
    from plotly import graph_objects as go

    names = [diff.state for diff in report.states]
    figure = go.Figure()
    for label, attribute, symbol in (
        ("median", "median", "circle"),
        ("99 %", "p99", "diamond"),
        ("worst", "worst", "x"),
    ):
        errors = [getattr(diff, attribute) for diff in report.states]
        figure.add_scatter(
            name=label,
            x=names,
            y=_drawn(errors),
            mode="markers",
            marker={"size": 11, "symbol": symbol},
            customdata=[_short(error) for error in errors],
            hovertemplate="%{x}: %{customdata}",
        )
    _limits(figure)
    return figure


def _by_position(report: CompareReport) -> Any:
    from plotly import graph_objects as go

    figure = go.Figure()
    for diff in report.states:
        places = [
            f"{part.first}..{part.last}" if part.last > part.first else f"{part.first}" for part in diff.by_position
        ]
        errors = [part.error for part in diff.by_position]
        figure.add_scatter(
            name=diff.state,
            x=places,
            y=_drawn(errors),
            customdata=[_short(error) for error in errors],
            hovertemplate="rows %{x}: %{customdata}",
        )
    _limits(figure)
    figure.update_xaxes(title="row of the sample", type="category")
    return figure


def _matrix(report: CompareReport) -> Any:
    from plotly import graph_objects as go

    rows = list(report.matrix)
    columns = list(next(iter(report.matrix.values())))
    errors = [[report.matrix[row][column] for column in columns] for row in rows]
    figure = go.Figure(
        go.Heatmap(
            z=[_drawn(line) for line in errors],
            x=columns,
            y=rows,
            zmin=0,
            zmax=1,
            colorscale="Blues_r",
            text=[[_short(error) for error in line] for line in errors],
            texttemplate="%{text}" if max(len(rows), len(columns)) <= NUMBERED else None,
            hovertemplate="%{y} of A, %{x} of B: %{text}<extra></extra>",
            colorbar={"title": "error"},
        )
    )
    figure.update_xaxes(title="B", type="category")
    figure.update_yaxes(title="A", type="category", autorange="reversed")
    return figure


def _rows(diff: SampleDiff) -> str:
    if diff.first == diff.last:
        return f"row {diff.first} of {diff.rows}"
    return f"{diff.off_rows} in {diff.first}..{diff.last} of {diff.rows}"


def _samples(report: CompareReport) -> str:
    if not report.off_samples:
        return ""
    rows = "".join(
        f"<tr><td class=id>{html.escape(diff.sample)}<td>{html.escape(diff.source)}<td>{html.escape(diff.state)}"
        f"<td>{_rows(diff)}<td>{html.escape('; '.join(diff.moves))}</tr>"
        for diff in report.off_samples
    )
    head = "<tr><th>sample<th>source<th>state<th>rows off<th>where they are</tr>"
    more = report.off_count - len(report.off_samples)
    rest = f"<p class=note>and {more:,} more</p>" if more else ""
    title = f"Samples that differ ({report.off_count:,})"
    return f"<h2>{title}</h2><div class=wide><table>{head}{rows}</table></div>{rest}"


def _facts(report: CompareReport) -> str:
    if not report.facts:
        return ""
    return (
        "<h2>Facts that differ</h2><ul>" + "".join(f"<li>{html.escape(fact)}</li>" for fact in report.facts) + "</ul>"
    )
