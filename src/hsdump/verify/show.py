"""A verification's report for people."""

from __future__ import annotations

from collections import Counter

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hsdump.verify.findings import CORRUPT, Report

SHOWN_PER_CHECK = 8
"""Rows of the table for one kind of finding; --json lists more, and the caption counts all."""

COLOURS = {"clean": "green", "suspicious": "yellow", "corrupt": "red"}


def show_report(report: Report) -> RenderableType:
    """Lay a report out: verdict, sizes per layer, findings."""
    parts: list[RenderableType] = [_verdict(report)]
    if report.layers and report.samples:
        parts.append(_layers(report))
    if report.findings:
        parts.append(_findings(report))
    for title, counts in (("failed at capture", report.failures), ("input rows skipped", report.skips)):
        if counts:
            parts.append(Text(f"{title}: " + ", ".join(f"{reason} {count}" for reason, count in counts.items())))
    if report.proof:
        parts.append(Text(f"proof of its states: {report.proof}", style="" if report.proof == "proved" else "yellow"))
    return Group(*parts)


def human_bytes(num_bytes: float) -> str:
    """Write a size as people read it: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _verdict(report: Report) -> Text:
    text = Text()
    text.append(f"{report.store}: ")
    text.append(report.verdict, style=f"bold {COLOURS[report.verdict]}")
    text.append(f", {report.samples} samples, {report.tokens} tokens ({report.learned_tokens} learned), ")
    text.append(f"{human_bytes(report.bytes_read)} read in {report.seconds:.1f} s")
    if report.sampled:
        part = f"only {report.sampled.checked} of {report.sampled.of} samples"
        text.append(f"\n{part} were looked at (seed {report.sampled.seed})", style="bold yellow")
    return text


def _layers(report: Report) -> Table:
    table = Table(title="norms of token rows", title_justify="left")
    table.add_column("state")
    for name in ("rows", "min", "median", "mean", "p99", "max", "zero rows"):
        table.add_column(name, justify="right")
    for layer in report.layers:
        norms = (layer.norm_min, layer.norm_median, layer.norm_mean, layer.norm_p99, layer.norm_max)
        zero = Text(str(layer.zero_rows), style="red" if layer.zero_rows else "")
        table.add_row(layer.layer, str(layer.rows), *(f"{norm:.4g}" for norm in norms), zero)
    return table


def _findings(report: Report) -> Table:
    table = Table(title="findings", title_justify="left")
    for name in ("check", "sample", "where", "what"):
        table.add_column(name, overflow="fold")
    shown: Counter[str] = Counter()
    for finding in report.findings:
        shown[finding.check] += 1
        if shown[finding.check] > SHOWN_PER_CHECK:
            continue
        style = "red" if finding.check in CORRUPT else "yellow"
        place = [finding.layer or "", f"token {finding.token}" if finding.token is not None else ""]
        if finding.rows and finding.rows > 1:
            place.append(f"and {finding.rows - 1} more rows")
        place.append(finding.shard or "")
        sample = f"{finding.sample} {finding.source or ''}" if finding.sample else ""
        table.add_row(Text(finding.check, style), sample, " ".join(filter(None, place)), finding.detail)
    table.caption = "all: " + ", ".join(f"{name} {count}" for name, count in report.counts.items())
    return table
