"""One HTML page about a prepare run: the mask over the text, lengths, and an example of each reason. No scripts."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hsdump.prompts.pipeline import Notes
from hsdump.prompts.show import Run, runs_of
from hsdump.prompts.tokens import Tokens
from hsdump.samples import TokenSample

_MAX_SAMPLES = 20
_MAX_CHARS = 20_000
"""Of one sample's text; the page says how much more there is."""

_LEGEND = (
    "<p><span class='learned'>learned</span>, <span class='plain'>context</span>, "
    "<span class='special'>control token</span></p>"
)
_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 1.5rem } td, th { padding: .15rem .8rem .15rem 0; text-align: left;
  vertical-align: top } td.n { text-align: right; font-variant-numeric: tabular-nums }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #8886; border-radius: 6px; padding: .8rem }
.plain { opacity: .65 } .learned { background: #2a93; border-bottom: 2px solid #2a9 } .special { color: #c3a }
.bar { display: inline-block; height: .8rem; background: #2a9; vertical-align: middle } .lost { color: #d33 }
"""


@dataclass(kw_only=True, slots=True)
class Histogram:
    """Counts values in bins that double in width, so that it needs no range beforehand."""

    counts: dict[int, int] = field(default_factory=dict)

    def add(self, value: int) -> None:
        bin_number = value.bit_length()
        self.counts[bin_number] = self.counts.get(bin_number, 0) + 1

    def rows(self) -> list[tuple[str, int]]:
        """Give ("low-high", count) in order, empty bins between others included."""
        if not self.counts:
            return []
        bins = range(min(self.counts), max(self.counts) + 1)
        return [(f"{1 << at >> 1:,}-{(1 << at) - 1:,}", self.counts.get(at, 0)) for at in bins]


@dataclass(kw_only=True, slots=True)
class Page:
    """Collects what the page shows while samples stream by."""

    tokens: Tokens | None
    lengths: Histogram = field(default_factory=Histogram)
    shares: dict[int, int] = field(default_factory=dict)
    """Tenth of a sample's tokens that is learned, to number of samples."""

    samples: list[TokenSample] = field(default_factory=list)

    def add(self, sample: TokenSample) -> None:
        self.lengths.add(len(sample.input_ids))
        tenth = min(int(10 * sample.loss_mask.mean()), 9)
        self.shares[tenth] = self.shares.get(tenth, 0) + 1
        if len(self.samples) < _MAX_SAMPLES:
            self.samples.append(sample)

    def html(self, report: dict[str, Any], notes: Notes) -> str:
        """Write the page.

        Args:
            report: what `PrepareReport.data` gives.
            notes: counts with one sample of each.
        """
        shares = [(f"{10 * at}-{10 * at + 10} %", self.shares.get(at, 0)) for at in range(10)]
        parts = [
            "<!doctype html><html lang='en'><meta charset='utf-8'><title>hsdump prepare</title>",
            f"<style>{_STYLE}</style><h1>hsdump prepare</h1>",
            _counts(report),
            "<h2>Skipped</h2>" + _skips(report) if report["skips"] else "",
            "<h2>Tokens of a sample</h2>" + _bars(self.lengths.rows()),
            "<h2>Share of a sample that is learned</h2>" + _bars(shares),
            "<h2>One of each</h2>" + "".join(self._example(name, at) for name, at in notes.examples.items()),
            f"<h2>Samples</h2>{_LEGEND}",
            *(self._sample(sample) for sample in self.samples),
            "<h2>Settings</h2>" + _table((name, _text(value)) for name, value in report["settings"].items()),
        ]
        return "\n".join(part for part in parts if part) + "\n"

    def _example(self, name: str, sample: TokenSample) -> str:
        if name.startswith(("shape:", "mask:")):
            return f"<p><b>{_text(name)}</b>: {_text(sample.source)}</p>"
        return f"<p><b>{_text(name)}</b></p>{self._sample(sample)}"

    def _sample(self, sample: TokenSample) -> str:
        head = f"<h3>{_text(sample.source)}</h3><p>{len(sample.input_ids):,} tokens, "
        head += f"{int(sample.loss_mask.sum()):,} learned, key <code>{sample.key}</code></p>"
        if self.tokens is None:
            return head
        return f"{head}<pre>{_spans(runs_of(sample, self.tokens))}</pre>"


def _spans(runs: Sequence[Run]) -> str:
    out, left = [], _MAX_CHARS
    for run in runs:
        kinds = ("learned" if run.learned else "plain") + (" special" if run.special else "")
        out.append(f"<span class='{kinds}'>{_text(run.text[:left])}</span>")
        left -= len(run.text)
        if left <= 0:
            out.append(f"<p>(the first {_MAX_CHARS:,} characters)</p>")
            break
    return "".join(out)


def _counts(report: dict[str, Any]) -> str:
    names = (("rows", "rows read"), ("samples", "samples"), ("tokens", "tokens"), ("loss_tokens", "loss tokens"))
    rows = [(title, f"{report[name]:,}") for name, title in names]
    rows += [(_text(name), f"{count:,}") for name, count in report["notes"].items()]
    return _table(rows)


def _skips(report: dict[str, Any]) -> str:
    rows = ["<tr><th>reason</th><th>rows</th><th>for example</th></tr>"]
    for reason, count in report["skips"].items():
        example = report["examples"][reason][0]
        cells = f"<td>{_text(reason)}</td><td class='n'>{count:,}</td>"
        rows.append(f"<tr>{cells}<td>{_text(example['source'])}: {_text(example['detail'])}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def _bars(rows: Sequence[tuple[str, int]]) -> str:
    most = max((count for _, count in rows), default=0) or 1
    return _table(
        (name, f"<span class='bar' style='width:{300 * count / most:.0f}px'></span> {count:,}") for name, count in rows
    )


def _table(rows: Any) -> str:
    return "<table>" + "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in rows) + "</table>"


def _text(value: Any) -> str:
    return html.escape(str(value).encode(errors="backslashreplace").decode())
