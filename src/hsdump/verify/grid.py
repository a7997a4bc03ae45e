"""Were bfloat16 states rounded to float16 on their way? Then all of their tiniest values lie on float16's grid.

float16 has more digits than bfloat16, so nothing shows but among values below 2^-17: there float16 only knows multiples
of 2^-24, and a bfloat16 with all its bits may fall between them. How many do is another matter: a tiny value of the
residual stream is mostly the difference of two larger ones, and has few bits left. So the odd mantissas of the two
octaves above, which float16 leaves as they are, say how many to expect; or another capture of the same tokens does.

Letters: S = tokens of one sample, H = hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from hsdump.arrays import StateArray

LOOKED_AT = 1 << 20
"""Values of one state of one sample; rows spread evenly."""

BITS = 20.0
"""Evidence needed: chance alone would look so in 1 of a million cases."""

_EDGE = 110 << 7
"""Bits of 2^-17, the sign left out."""

_ABOVE = 112 << 7
"""Bits of 2^-15."""


@dataclass(slots=True)
class _Counts:
    above: int = 0
    """Values of the two octaves above the edge."""

    odd: int = 0
    """Of those, with a last bit of one."""

    tiny: int = 0
    """Values below the edge, zero left out."""

    off_grid: int = 0
    """Of those, not float16's. A single one shows that the values never were float16."""

    def expected(self) -> float:
        """Tell how many values to expect off the grid, two standard deviations on the safe side."""
        return self.tiny * max(0.0, self.odd - 2 * math.sqrt(self.odd)) / max(self.above, 1)


@dataclass(slots=True)
class GridEvidence:
    """How many of the tiniest values lie on float16's grid, state by state."""

    counts: dict[str, _Counts] = field(default_factory=dict)

    def add(self, name: str, state_SH: StateArray) -> None:
        """Look at bfloat16 bits of one state."""
        step = max(1, -(-state_SH.size // LOOKED_AT))
        sizes = state_SH[::step] & np.uint16(0x7FFF)
        small = sizes[(sizes < _ABOVE) & (sizes >= 1 << 7)].astype(np.int64)
        above, tiny = small[small >= _EDGE], small[small < _EDGE]
        lost = np.minimum(110 - (tiny >> 7), 8)
        off_grid = (lost == 8) | (((tiny & 0x7F) | 0x80) % (1 << lost) != 0)
        self._of(name, _Counts(len(above), int((above & 1).sum()), len(tiny), int(off_grid.sum())))

    def merge(self, other: GridEvidence) -> None:
        for name, counts in other.counts.items():
            self._of(name, counts)

    def _of(self, name: str, more: _Counts) -> None:
        counts = self.counts.setdefault(name, _Counts())
        counts.above += more.above
        counts.odd += more.odd
        counts.tiny += more.tiny
        counts.off_grid += more.off_grid

    @property
    def off_grid(self) -> int:
        return sum(counts.off_grid for counts in self.counts.values())

    @property
    def tiny(self) -> int:
        return sum(counts.tiny for counts in self.counts.values())

    @property
    def is_float16(self) -> bool:
        """Judge by these values alone: none is off the grid, and many should be."""
        expected = sum(counts.expected() for counts in self.counts.values())
        return self.off_grid == 0 and expected / math.log(2) >= BITS

    def is_float16_beside(self, other: GridEvidence) -> bool:
        """Judge by another capture of the same tokens: each of its values off the grid is a coin that fell one way."""
        return self.off_grid == 0 and other.off_grid >= BITS
