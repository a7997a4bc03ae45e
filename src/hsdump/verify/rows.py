"""How two captures of the same tokens differ, row by row, and where a row that is not in its place came from.

Letters: S, T = rows of two samples, H = hidden size, K = rows looked at together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Wide = NDArray[np.float32]

SAME_SAMPLE = 0.05
"""Median relative error of a sample's rows up to which two captures count as the same numbers. bfloat16 rounding in
another order of additions gives 0.007 to 0.009 on 6 to 8 layers and 0.01 to 0.03 on deep models; the fp8 codec 0.026; a
layer off by one 0.3 and more."""

SAME_ROW = 0.1
"""The same for one row, which may be an unlucky one."""

UNLUCKY = 8.0
"""A row this many times off the median of all rows is off, however noisy the engine pair is."""

RUN = 4
"""Rows that must be found one after another elsewhere before they count as moved."""


def row_errors(found_SH: Wide, expected_SH: Wide) -> NDArray[np.float32]:
    """Give |found - expected| / |expected| of each row, float32 [S]; infinite where a number is none."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        error: NDArray[np.float32] = np.linalg.norm(found_SH - expected_SH, axis=1) / np.maximum(
            np.linalg.norm(expected_SH, axis=1), np.float32(1e-30)
        )
    return np.where(np.isfinite(error), error, np.float32(np.inf)).astype(np.float32)


def row_cosines(found_SH: Wide, expected_SH: Wide) -> NDArray[np.float32]:
    """Give the cosine of each pair of rows, float32 [S]; 0 where one has no direction."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        cosine: NDArray[np.float32] = np.einsum("sh,sh->s", found_SH, expected_SH) / (
            np.linalg.norm(found_SH, axis=1) * np.linalg.norm(expected_SH, axis=1)
        )
    return np.where(np.isfinite(cosine), cosine, np.float32(0)).astype(np.float32)


def row_limit(median: float) -> float:
    """Give the error beyond which a row is off, where this is the median of all rows."""
    return max(SAME_ROW, UNLUCKY * median)


@dataclass(frozen=True, slots=True)
class Move:
    """Consecutive rows that are found at another place."""

    first: int
    last: int
    from_first: int
    """Row of the other capture that row `first` equals."""

    key: str | None = None
    """The sample that holds those, when it is another one."""

    def __str__(self) -> str:
        where = f"of sample {self.key}" if self.key else "of the other capture"
        from_last = self.from_first + self.last - self.first
        return f"rows {self.first}..{self.last} are rows {self.from_first}..{from_last} {where}"


def find_moves(found_SH: Wide, expected_TH: Wide, rows: NDArray[np.int64], key: str | None = None) -> list[Move]:
    """Look for rows of one capture anywhere in the other.

    Args:
        rows: those that are not where they should be.
        key: names the other sample in the result.

    Returns:
        Runs of at least `RUN` rows that follow each other on both sides.
    """
    places: dict[int, int] = {}
    lengths_T = np.square(expected_TH).sum(axis=1)
    for start in range(0, len(rows), 512):
        part = rows[start : start + 512]
        block_KH = found_SH[part]
        with np.errstate(over="ignore", invalid="ignore"):
            distance_KT = lengths_T[None] - 2 * block_KH @ expected_TH.T
            distance_KT = np.where(np.isfinite(distance_KT), distance_KT, np.inf)
        nearest = distance_KT.argmin(axis=1)
        errors = row_errors(block_KH, expected_TH[nearest])
        for row, place, error in zip(part, nearest, errors, strict=True):
            if error <= SAME_ROW and (row != place or key is not None):
                places[int(row)] = int(place)
    return [move for move in _runs(places, key) if move.last - move.first + 1 >= RUN]


def _runs(places: dict[int, int], key: str | None) -> list[Move]:
    moves: list[Move] = []
    for row, place in sorted(places.items()):
        if moves and row == moves[-1].last + 1 and place - row == moves[-1].from_first - moves[-1].first:
            moves[-1] = Move(moves[-1].first, row, moves[-1].from_first, key)
        else:
            moves.append(Move(row, row, place, key))
    return moves


def norm_apart(found_SH: Wide, expected_SH: Wide) -> bool:
    """Tell whether one is the other before or after an RMSNorm: quotients that are a row's factor times a channel's."""
    solid = (np.abs(found_SH) > 1e-6) & (np.abs(expected_SH) > 1e-6)
    if len(found_SH) < RUN or not solid.any(axis=0).all():
        return False
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.where(solid & (found_SH * expected_SH > 0), np.log(found_SH / expected_SH), np.nan)
    if np.isnan(quotient).mean() > 0.1:
        return False
    quotient = quotient - np.nanmedian(quotient, axis=1, keepdims=True)
    quotient = quotient - np.nanmedian(quotient, axis=0, keepdims=True)
    return bool(np.nanmedian(np.abs(quotient)) < SAME_SAMPLE)
