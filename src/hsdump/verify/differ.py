"""The difference of two captures of the same tokens, gathered sample by sample; memory grows with rows alone.

Letters: S = rows of one sample, H = hidden size, K = rows looked at in all pairs of states.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from hsdump.arrays import StateArray
from hsdump.layers import FINAL
from hsdump.verify.grid import GridEvidence
from hsdump.verify.rows import (
    RUN,
    SAME_ROW,
    SAME_SAMPLE,
    Move,
    Wide,
    find_moves,
    norm_apart,
    row_cosines,
    row_errors,
    row_limit,
)

POSITION_EDGES = (0, 1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 1 << 30)
"""Rows are summed up by position in bins that grow by four: the first token is special in most models."""

PAIRED_ROWS = 4096
"""Row comparisons of one sample spent on finding each state's best match."""

EXPLAINED = 8
"""Samples that are looked at again, to say where their rows came from."""

ROUTED = re.compile(r"moe|deepseekv[23]|kimi|mixtral|gptoss|minimax|llama4|qwen3next|dbrx|jamba", re.IGNORECASE)
"""Model classes with a mixture of experts: rounding turns a near tie in the routing now and then, and that row is then
different for real. Scattered rows are counted but not held against such a model, up to `ROUTED_SHARE`."""

ROUTED_SHARE = 0.1


class PositionBin(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of some positions."""

    first: int
    last: int
    rows: int
    error: float
    """Median relative error."""


class StateDiff(msgspec.Struct, frozen=True, kw_only=True):
    """How one state differs."""

    state: str
    rows: int
    error: float
    """|A - B| / |B| over all rows."""

    median: float
    p99: float
    worst: float
    """Relative errors of single rows."""

    cosine: float
    """Mean over rows."""

    worst_cosine: float
    off_rows: int
    """Rows beyond what rounding explains."""

    best_match: str
    """The state of B that A's state is closest to."""

    best_match_error: float
    by_position: list[PositionBin]
    prompt: float | None = None
    generated: float | None = None
    """Median relative errors of the rows before and within the tokens that are learned from."""


class SampleDiff(msgspec.Struct, frozen=True, kw_only=True):
    """A sample that differs by more than rounding."""

    sample: str
    source: str
    state: str
    """The state that shows it most."""

    median: float
    off_rows: int
    rows: int
    first: int
    last: int
    """First and last row that are off."""

    moves: list[str] = []
    """Where its rows were found instead."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pair:
    """One sample of both captures, widened."""

    key: str
    source: str
    found: Mapping[str, Wide]
    expected: Mapping[str, Wide]
    learned: NDArray[np.bool_]
    """[S] rows of learned tokens."""

    bits: tuple[Mapping[str, StateArray], Mapping[str, StateArray]] | None = None
    """Both sides as they are stored, where both are bfloat16 without loss."""


@dataclass(slots=True)
class _State:
    errors: list[NDArray[np.float32]] = field(default_factory=list)
    cosines: list[NDArray[np.float32]] = field(default_factory=list)
    difference: float = 0.0
    size: float = 0.0
    not_finite: list[int] = field(default_factory=lambda: [0, 0])
    """Rows with NaN or infinity on either side."""


class Differ:
    """Takes pairs, gives differences."""

    def __init__(self, model_class: str = "", sides: tuple[str, str] = ("A", "B")) -> None:
        """Args:
        model_class: decides whether scattered rows may be rerouted tokens.
        sides: what the two are called in sentences.
        """
        self.sides = sides
        self.routed = ROUTED.search(model_class) is not None
        self.samples: list[tuple[str, str]] = []
        self.tokens = 0
        self._learned: list[NDArray[np.bool_]] = []
        self._states: dict[str, _State] = {}
        self._matches: dict[tuple[str, str], list[NDArray[np.float32]]] = {}
        self._norm_apart: list[bool] = []
        self._grids = (GridEvidence(), GridEvidence())

    def add(self, pair: Pair) -> None:
        """Take one sample. Rows beyond the shorter side are counted as off by the caller's lengths check."""
        self.samples.append((pair.key, pair.source))
        self._learned.append(pair.learned)
        self.tokens += len(pair.learned)
        for name, found_SH in pair.found.items():
            if name not in pair.expected:
                continue
            expected_SH = pair.expected[name]
            state = self._states.setdefault(name, _State())
            for side, values_SH in enumerate((found_SH, expected_SH)):
                state.not_finite[side] += int((~np.isfinite(values_SH).all(axis=1)).sum())
            state.errors.append(row_errors(found_SH, expected_SH))
            state.cosines.append(row_cosines(found_SH, expected_SH))
            with np.errstate(over="ignore", invalid="ignore"):
                state.difference += float(np.nan_to_num(np.square(found_SH - expected_SH, dtype=np.float64)).sum())
                state.size += float(np.square(expected_SH, dtype=np.float64).sum())
        if FINAL in pair.found and FINAL in pair.expected:
            self._norm_apart.append(norm_apart(pair.found[FINAL], pair.expected[FINAL]))
        for grid, states in zip(self._grids, pair.bits or (), strict=False):
            for name, state_SH in states.items():
                if name in pair.found and name in pair.expected:
                    grid.add(name, state_SH)
        self._match(pair)

    def _match(self, pair: Pair) -> None:
        """Compare a few rows of each state with each state of the other side."""
        count = max(2, min(64, PAIRED_ROWS // max(1, len(pair.found) * len(pair.expected))))
        rows = np.unique(np.linspace(0, len(pair.learned) - 1, count).astype(np.int64))
        for name, found_SH in pair.found.items():
            for other, expected_SH in pair.expected.items():
                errors = row_errors(found_SH[rows], expected_SH[rows])
                self._matches.setdefault((name, other), []).append(errors)

    @property
    def common(self) -> list[str]:
        """States that both sides have."""
        return list(self._states)

    def matrix(self) -> dict[str, dict[str, float]]:
        """Give each state of A's median row error against each state of B."""
        table: dict[str, dict[str, float]] = {}
        for (name, other), errors in self._matches.items():
            table.setdefault(name, {})[other] = float(np.median(np.concatenate(errors)))
        return table

    def not_finite(self) -> list[str]:
        """Say which states hold numbers that are none."""
        return [
            f"{name} of {side} holds NaN or infinity in {rows} of {sum(map(len, state.errors))} rows"
            for name, state in self._states.items()
            for side, rows in zip(self.sides, state.not_finite, strict=True)
            if rows
        ]

    def rounded(self) -> list[str]:
        """Say which side went through float16 while the other did not."""
        found = []
        for mine, others in ((0, 1), (1, 0)):
            grid, other = self._grids[mine], self._grids[others]
            if grid.is_float16_beside(other):
                found.append(
                    f"the states of {self.sides[mine]} were rounded to float16 on their way: none of their {grid.tiny} "
                    f"tiniest values lies off its grid, {other.off_grid} of {self.sides[others]} do"
                )
        return found

    def is_norm_apart(self) -> bool:
        """Tell whether the final states are one before and one after the norm."""
        return bool(self._norm_apart) and float(np.mean(self._norm_apart)) > 0.5

    def states(self) -> list[StateDiff]:
        """Sum up each common state."""
        matrix = self.matrix()
        learned = np.concatenate(self._learned) if self._learned else np.zeros(0, np.bool_)
        positions = np.concatenate([np.arange(len(part)) for part in self._learned] or [np.zeros(0, np.int64)])
        return [self._state_diff(name, matrix[name], learned, positions) for name in self._states]

    def _state_diff(
        self, name: str, matches: dict[str, float], learned: NDArray[np.bool_], positions: NDArray[np.int64]
    ) -> StateDiff:
        state = self._states[name]
        errors, cosines = np.concatenate(state.errors), np.concatenate(state.cosines)
        median = float(np.median(errors))
        best = min(matches, key=lambda other: (matches[other], other != name))
        bins = []
        for first, last in itertools.pairwise(POSITION_EDGES):
            inside = errors[(positions >= first) & (positions < last)]
            if len(inside):
                top = min(last - 1, int(positions.max()))
                bins.append(PositionBin(first=first, last=top, rows=len(inside), error=float(np.median(inside))))
        return StateDiff(
            state=name,
            rows=len(errors),
            error=float(np.sqrt(state.difference / max(state.size, 1e-300))),
            median=median,
            p99=float(np.quantile(errors, 0.99, method="higher")),
            worst=float(errors.max()),
            cosine=float(cosines.mean()),
            worst_cosine=float(cosines.min()),
            off_rows=int((errors > (row_limit(median) if median <= SAME_SAMPLE else SAME_ROW)).sum()),
            best_match=best,
            best_match_error=matches[best],
            by_position=bins,
            prompt=float(np.median(errors[~learned])) if (~learned).any() else None,
            generated=float(np.median(errors[learned])) if learned.any() else None,
        )

    def off_samples(self) -> list[SampleDiff]:
        """List the samples that differ by more than rounding, states that differ as a whole left out."""
        whole = {name for name in self._states if self.typical(name) > SAME_SAMPLE}
        found = []
        for index, (key, source) in enumerate(self.samples):
            diffs = [self._sample(index, name, key, source) for name in self._states if name not in whole]
            off = [diff for diff in diffs if diff is not None]
            if off:
                found.append(max(off, key=lambda diff: (diff.off_rows, diff.median)))
        return found

    def typical(self, name: str) -> float:
        """Give the median over samples of their median errors: a few bad samples do not move it."""
        return float(np.median([np.median(errors) for errors in self._states[name].errors]))

    def _sample(self, index: int, name: str, key: str, source: str) -> SampleDiff | None:
        errors = self._states[name].errors[index]
        off = np.flatnonzero(errors > row_limit(self.typical(name)))
        median = float(np.median(errors))
        if median <= SAME_SAMPLE and not self._counts(off, len(errors)):
            return None
        if not len(off):
            off = np.arange(len(errors))
        return SampleDiff(
            sample=key,
            source=source,
            state=name,
            median=median,
            off_rows=len(off),
            rows=len(errors),
            first=int(off[0]),
            last=int(off[-1]),
        )

    def _counts(self, off: NDArray[np.int64], rows: int) -> bool:
        """Decide whether these rows make the sample another one."""
        if not self.routed or not len(off):
            return bool(len(off))
        runs = np.split(off, np.flatnonzero(np.diff(off) != 1) + 1)
        return len(off) > ROUTED_SHARE * rows or max(map(len, runs)) > RUN


def whole_moves(name: str, pairs: Iterable[Pair]) -> list[Move]:
    """Look for moved rows in samples of a state that differs everywhere."""
    return [
        move
        for pair in pairs
        for move in find_moves(pair.found[name], pair.expected[name], np.arange(len(pair.learned)))
    ]


def explain(off: Iterable[SampleDiff], load: Callable[[str], Pair]) -> list[SampleDiff]:
    """Find where the rows of the first few samples came from: another place of the same sample, or another sample."""
    listed = list(off)
    pairs = {diff.sample: load(diff.sample) for diff in listed[:EXPLAINED]}
    explained = []
    for diff in listed:
        moves: list[Move] = []
        if diff.sample in pairs:
            found_SH = pairs[diff.sample].found[diff.state]
            rows = np.arange(diff.first, diff.last + 1)
            for key, other in pairs.items():
                moves += find_moves(found_SH, other.expected[diff.state], rows, None if key == diff.sample else key)
        explained.append(msgspec.structs.replace(diff, moves=[str(move) for move in moves[:4]]))
    return explained
