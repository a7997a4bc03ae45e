"""Counting what happened to every row, so that read = written + named reasons."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hsdump.prompts.options import Skip
from hsdump.prompts.pipeline import Notes
from hsdump.samples import TokenSample

_EXAMPLES = 5
"""Skips named in full for each reason; all are counted."""

WARNINGS = frozenset({"duplicate-ids", "samples-cut-at-limit", "thinking-lost", "tool-calls-lost"})
"""Notes that somebody should look into."""


@dataclass(kw_only=True, slots=True)
class PrepareReport:
    """Grows with each sample and skip; small, however many there are."""

    settings: dict[str, Any]
    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    longest: int = 0
    skips: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    """Skips that are damage, not policy."""

    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)

    def add(self, item: TokenSample | Skip) -> None:
        if isinstance(item, Skip):
            self.skips[item.reason] += 1
            self.lost += item.lost
            examples = self.examples.setdefault(item.reason, [])
            if len(examples) < _EXAMPLES:
                examples.append({"source": item.source, "detail": item.detail})
            return
        self.samples += 1
        self.tokens += len(item.input_ids)
        self.loss_tokens += int(item.loss_mask.sum())
        self.longest = max(self.longest, len(item.input_ids))

    def data(self) -> dict[str, Any]:
        """Give the report for scripts and for SAMPLES.report.json."""
        return {
            "rows": self.notes.counts["rows"],
            "samples": self.samples,
            "tokens": self.tokens,
            "loss_tokens": self.loss_tokens,
            "longest_sample_tokens": self.longest,
            "skips": dict(sorted(self.skips.items())),
            "lost": self.lost,
            "examples": self.examples,
            "notes": {name: count for name, count in sorted(self.notes.counts.items()) if name != "rows"},
            "first_of": {name: sample.source for name, sample in sorted(self.notes.examples.items())},
            "settings": self.settings,
        }

    def text(self) -> RenderableType:
        """Give the report for people."""
        table = Table("", "", box=None, show_header=False, pad_edge=False)
        share = f"  ({self.loss_tokens / self.tokens:.0%} of tokens)" if self.tokens else ""
        for name, value in (
            ("rows read", f"{self.notes.counts['rows']:,}"),
            ("samples", f"{self.samples:,}"),
            ("tokens", f"{self.tokens:,}  (longest sample {self.longest:,})"),
            ("loss tokens", f"{self.loss_tokens:,}{share}"),
        ):
            table.add_row(name, value)
        for name, count in sorted(self.notes.counts.items()):
            if name != "rows":
                style = "yellow" if name in WARNINGS else "dim"
                table.add_row(Text(f"  {name}", style=style), Text(f"{count:,}", style=style))
        parts: list[RenderableType] = [table]
        if self.skips:
            skipped = Table("skipped because", "count", "for example", box=None, pad_edge=False)
            for reason, count in self.skips.most_common():
                first = self.examples[reason][0]
                style = "red" if Skip(source="", reason=reason, detail="").lost else "yellow"
                example = Text(f"{first['source']}: {first['detail']}", overflow="ellipsis")
                skipped.add_row(Text(reason, style=style), f"{count:,}", example)
            parts.append(skipped)
        return Group(*parts)
