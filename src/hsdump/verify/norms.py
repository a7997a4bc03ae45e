"""Norms of token rows: a histogram per state that any amount of data fits in, and rows that stand out.

Letters: S = tokens of one sample, H = hidden size, B = rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsdump.arrays import StateArray, to_float32
from hsdump.verify.findings import LayerSummary

BINS_PER_DOUBLING = 16
"""Histogram resolution: 4.4 %."""

LOWEST, HIGHEST = -40, 60
"""log2 of the norms that have bins of their own."""

DROP, PEAK = 1e-3, 1e4
"""A row's norm over its sample's median beyond which it stands out. The first token of real models is an attention
sink with up to a few hundred times the usual norm, so the upper bound is far off.
"""

SAMPLE_FACTOR = 16.0
"""A sample's median norm over the store's median, either way, beyond which the whole sample stands out."""

ROWS_FOR_MEDIAN = 8
"""Shorter samples have no median worth comparing with."""

BLOCK_ELEMENTS = 1 << 18
"""float32 values widened at a time: 1 MiB stays in the cache."""


@dataclass(slots=True)
class RowScan:
    """What one pass over a state's rows saw."""

    norms: NDArray[np.float32]
    """[S]"""

    not_finite: list[int] = field(default_factory=list)
    """Token rows."""

    constant: list[int] = field(default_factory=list)
    """Token rows whose values are all the same, but not zero."""


def scan_rows(state_SH: StateArray, dtype: str) -> RowScan:
    """Look at every value of a state once."""
    num_tokens, width = state_SH.shape
    step = max(1, BLOCK_ELEMENTS // width)
    scan = RowScan(norms=np.empty(num_tokens, np.float32))
    for start in range(0, num_tokens, step):
        block_BH = to_float32(state_SH[start : start + step], dtype)
        _scan_block(block_BH, start, scan)
    return scan


def _scan_block(block_BH: NDArray[np.float32], start: int, scan: RowScan) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        squares_B = np.einsum("bh,bh->b", block_BH, block_BH)
    for row in np.flatnonzero(~np.isfinite(squares_B)):
        if not np.isfinite(block_BH[row]).all():
            scan.not_finite.append(start + int(row))
            squares_B[row] = np.nan
        else:  # finite values whose squares overflow float32
            squares_B[row] = np.float32(min(float(np.square(block_BH[row], dtype=np.float64).sum()), 3e38))
    scan.norms[start : start + len(block_BH)] = np.sqrt(squares_B)
    probe = block_BH[:, :8]
    for row in np.flatnonzero((probe == probe[:, :1]).all(axis=1) & (squares_B > 0)):
        if (block_BH[row] == block_BH[row, 0]).all():
            scan.constant.append(start + int(row))


class NormHistogram:
    """Counts of row norms on a logarithmic scale."""

    def __init__(self) -> None:
        self.counts: NDArray[np.int64] = np.zeros((HIGHEST - LOWEST) * BINS_PER_DOUBLING, np.int64)
        self.rows = 0
        self.zero_rows = 0
        self.low, self.high, self.total = np.inf, 0.0, 0.0

    def add(self, norms: NDArray[np.float32]) -> None:
        """Count finite norms."""
        finite = norms[np.isfinite(norms)]
        positive = finite[finite > 0]
        self.rows += len(finite)
        self.zero_rows += len(finite) - len(positive)
        if len(positive):
            bins = ((np.log2(positive) - LOWEST) * BINS_PER_DOUBLING).astype(np.int64)
            np.add.at(self.counts, np.clip(bins, 0, len(self.counts) - 1), 1)
            self.low = min(self.low, float(positive.min()))
            self.high = max(self.high, float(positive.max()))
            self.total += float(positive.sum(dtype=np.float64))

    def merge(self, other: NormHistogram) -> None:
        self.counts += other.counts
        self.rows += other.rows
        self.zero_rows += other.zero_rows
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.total += other.total

    def quantile(self, share: float) -> float:
        """Give the norm below which this share of the non-zero rows lies, to half a bin, never beyond what was seen."""
        cumulated = np.cumsum(self.counts)
        if not len(cumulated) or not cumulated[-1]:
            return 0.0
        place = int(np.searchsorted(cumulated, share * cumulated[-1]))
        middle = float(2.0 ** (LOWEST + (place + 0.5) / BINS_PER_DOUBLING))
        return min(max(middle, self.low), self.high)

    def summary(self, layer: str) -> LayerSummary:
        return LayerSummary(
            layer=layer,
            rows=self.rows,
            norm_min=0.0 if self.zero_rows or not self.rows else self.low,
            norm_median=self.quantile(0.5),
            norm_mean=self.total / max(self.rows, 1),
            norm_p99=self.quantile(0.99),
            norm_max=self.high,
            zero_rows=self.zero_rows,
        )


def stand_out(norms: NDArray[np.float32]) -> tuple[float, list[int], list[int]]:
    """Compare a sample's rows with each other.

    Returns:
        The median of the non-zero norms (nan for a short sample), rows far below it, rows far above it.
    """
    positive = norms[np.isfinite(norms) & (norms > 0)]
    if len(positive) < ROWS_FOR_MEDIAN:
        return float("nan"), [], []
    median = float(np.median(positive))
    low = np.flatnonzero((norms > 0) & (norms < DROP * median))
    high = np.flatnonzero(norms > PEAK * median)
    return median, _list(low), _list(high)


def repeated_rows(state_SH: StateArray, norms: NDArray[np.float32], input_ids: NDArray[np.int64]) -> list[int]:
    """Find rows that equal the one before although the token is another: a buffer that was not filled."""
    same_norm = (norms[1:] == norms[:-1]) & (norms[1:] > 0) & (input_ids[1:] != input_ids[:-1])
    return [int(row) + 1 for row in np.flatnonzero(same_norm) if np.array_equal(state_SH[row], state_SH[row + 1])]


def _list(rows: Iterable[Any]) -> list[int]:
    return [int(row) for row in rows]
