"""What a verification can find, how bad it is, and the report that holds it.

Exit codes of `hsdump verify`: 0 clean, 1 suspicious (readable, but somebody should look), 2 corrupt (bytes or numbers
that no sound capture leaves).
"""

from __future__ import annotations

from collections import Counter

import msgspec

CORRUPT = frozenset(
    (
        "manifest",
        "index",
        "shard-missing",
        "shard-damaged",
        "shard-disagrees",
        "checksum",
        "codec",
        "shape",
        "key",
        "token-id",
        "mask-value",
        "not-finite",
    )
)
"""Checks whose findings make a store corrupt."""

SUSPICIOUS = frozenset(
    (
        "no-samples",
        "index-missing",
        "shard-not-indexed",
        "too-long",
        "mask-empty",
        "duplicate-tokens",
        "layers-equal",
        "zero-row",
        "constant-row",
        "repeated-row",
        "norm-drop",
        "norm-peak",
        "norm-of-sample",
        "float16-grid",
    )
)

KEPT_PER_CHECK = 50
"""Findings of one kind that are listed; all are counted. Keeps a report of a ruined store readable and small."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that is not as it should be, and where."""

    check: str
    detail: str
    sample: str | None = None
    source: str | None = None
    layer: str | None = None
    token: int | None = None
    """First token row that shows it."""

    rows: int | None = None
    """Token rows of this sample and layer that show it."""

    shard: str | None = None


class LayerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one state over all checked rows."""

    layer: str
    rows: int
    norm_min: float
    norm_median: float
    norm_mean: float
    norm_p99: float
    norm_max: float
    zero_rows: int


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """Says that not everything was looked at."""

    checked: int
    of: int
    seed: int


class Report(msgspec.Struct, kw_only=True):
    """What a verification saw."""

    store: str
    verdict: str = "clean"
    """`clean`, `suspicious` or `corrupt`."""

    exit_code: int = 0
    samples: int = 0
    """Checked."""

    tokens: int = 0
    learned_tokens: int = 0
    bytes_read: int = 0
    seconds: float = 0.0
    sampled: Sampled | None = None
    counts: dict[str, int] = {}
    """Check to number of findings, all of them."""

    findings: list[Finding] = []
    """At most `KEPT_PER_CHECK` of each."""

    layers: list[LayerSummary] = []
    failures: dict[str, int] = {}
    """Samples without states, by reason; they are the capture's business and not a fault of the store."""

    skips: dict[str, int] = {}

    proof: str = ""
    """What the `proof.json` beside it is worth: its verdict, `none`, or `outdated` and why."""


class Collector:
    """Gathers findings with bounded memory."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.kept: list[Finding] = []

    def add(self, finding: Finding) -> None:
        assert finding.check in CORRUPT | SUSPICIOUS, finding.check
        if self.counts[finding.check] < KEPT_PER_CHECK:
            self.kept.append(finding)
        self.counts[finding.check] += 1

    def verdict(self) -> tuple[str, int]:
        """Give the word and the exit code."""
        if CORRUPT & self.counts.keys():
            return "corrupt", 2
        return ("suspicious", 1) if self.counts else ("clean", 0)
