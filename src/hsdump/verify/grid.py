"""Were bfloat16 states rounded to float16 on their way? Then all of their tiniest values lie on float16's grid.

float16 has more digits than bfloat16, so nothing shows but among values below 2^-17: there float16 only knows multiples
of 2^-24, and a bfloat16 with all its bits falls between them half of the time or more.

Letters: S = tokens of one sample, H = hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsdump.arrays import StateArray

LOOKED_AT = 1 << 20
"""Values of one state of one sample; rows spread evenly."""

BITS = 20.0
"""Evidence needed: chance alone would look so in 1 of a million cases."""

_BELOW = 110 << 7
"""Bits of 2^-17, the sign left out."""


@dataclass(slots=True)
class GridEvidence:
    """How many of the tiniest values lie on float16's grid."""

    bits: float = 0.0
    """log2 of how unlikely that would be for values with all of bfloat16's bits."""

    off_grid: int = 0
    """A single one shows that the values never were float16."""

    def add(self, state_SH: StateArray) -> None:
        """Look at bfloat16 bits."""
        step = max(1, -(-state_SH.size // LOOKED_AT))
        sizes = state_SH[::step] & np.uint16(0x7FFF)
        tiny = sizes[(sizes < _BELOW) & (sizes >= 1 << 7)].astype(np.int64)
        shift = 110 - (tiny >> 7)
        on_grid = (shift < 8) & (((tiny & 0x7F) | 0x80) % (1 << np.minimum(shift, 8)) == 0)
        self.off_grid += int((~on_grid).sum())
        self.bits += float(shift[on_grid].sum())

    def merge(self, other: GridEvidence) -> None:
        self.bits += other.bits
        self.off_grid += other.off_grid

    @property
    def is_float16(self) -> bool:
        return self.off_grid == 0 and self.bits >= BITS
