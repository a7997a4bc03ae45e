"""A comparison as one HTML page with plots, readable without a network."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from hsdump.errors import UsageError
from hsdump.verify.compare import CompareReport

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top }
.same { color: #2a9 } .different { color: #d33 }
"""


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
    figures = [_by_state(report), _by_position(report), _matrix(report)] if report.states else []
    plots = [
        figure.to_html(full_html=False, include_plotlyjs=(index == 0), default_height="26rem")
        for index, figure in enumerate(figures)
    ]
    text = _head(report) + "".join(plots) + _samples(report) + _facts(report)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--html {path} cannot be written: {error.strerror}", "name a file in a folder of yours"
        ) from error


def _head(report: CompareReport) -> str:
    words = "".join(f"<li>{html.escape(text)}</li>" for text in report.words)
    kind = "same" if report.exit_code == 0 else "different"
    return (
        f"<!doctype html><meta charset=utf-8><title>hsdump compare</title><style>{_STYLE}</style>"
        f"<h1 class={kind}>{html.escape(report.verdict)}</h1>"
        f"<p>A {html.escape(report.store_a)}<br>B {html.escape(report.store_b)}</p>"
        f"<p>{report.samples} samples, {report.tokens} tokens in both; {report.only_a} only in A, "
        f"{report.only_b} only in B</p><ul>{words}</ul>"
    )


def _by_state(report: CompareReport) -> Any:
    from plotly import graph_objects as go

    names = [diff.state for diff in report.states]
    figure = go.Figure()
    for label in ("median", "p99", "worst"):
        figure.add_bar(name=label, x=names, y=[getattr(diff, label) for diff in report.states])
    figure.update_layout(title="Relative error of rows by state", yaxis_type="log", barmode="group")
    return figure


def _by_position(report: CompareReport) -> Any:
    from plotly import graph_objects as go

    figure = go.Figure()
    for diff in report.states:
        places = [f"{part.first}..{part.last}" for part in diff.by_position]
        figure.add_scatter(name=diff.state, x=places, y=[part.error for part in diff.by_position])
    figure.update_layout(title="Median relative error by position in the sample", yaxis_type="log")
    return figure


def _matrix(report: CompareReport) -> Any:
    from plotly import graph_objects as go

    rows = list(report.matrix)
    columns = list(next(iter(report.matrix.values())))
    errors = [[report.matrix[row][column] for column in columns] for row in rows]
    figure = go.Figure(go.Heatmap(z=errors, x=columns, y=rows, zmin=0, zmax=1, colorscale="Viridis"))
    figure.update_layout(
        title="Which state of B (across) is each state of A (down)? Dark is equal.", yaxis_autorange="reversed"
    )
    return figure


def _samples(report: CompareReport) -> str:
    if not report.off_samples:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(diff.sample)}<td>{html.escape(diff.source)}<td>{html.escape(diff.state)}"
        f"<td>{diff.first}..{diff.last} of {diff.rows}<td>{html.escape('; '.join(diff.moves))}</tr>"
        for diff in report.off_samples
    )
    head = "<tr><th>sample<th>source<th>state<th>rows<th>where they are</tr>"
    return f"<h2>Samples that differ ({report.off_count})</h2><table>{head}{rows}</table>"


def _facts(report: CompareReport) -> str:
    if not report.facts:
        return ""
    return (
        "<h2>Facts that differ</h2><ul>" + "".join(f"<li>{html.escape(fact)}</li>" for fact in report.facts) + "</ul>"
    )
