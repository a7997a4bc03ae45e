"""Client-side arrays: numpy has no bfloat16, so states travel as their bits and are widened only to be computed with.

Letters: S = tokens of one sample, H = hidden size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

StateArray = NDArray[Any]
"""[S, H] one state of one sample: uint16 bits for bfloat16, float16 and float32 as themselves."""

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
}
"""How each state dtype is held in numpy."""


def to_float32(state_SH: StateArray, dtype: str) -> NDArray[np.float32]:
    """Widen states to float32 without rounding: a bfloat16 is the upper half of a float32.

    Args:
        state_SH: bits as described by `StateArray`.
        dtype: what the bits mean, a key of `NUMPY_DTYPES`.

    Returns:
        float32, same shape, its own memory.
    """
    if dtype == "bfloat16":
        return (state_SH.astype(np.uint32) << 16).view(np.float32)
    return state_SH.astype(np.float32)


def xxh3(*buffers: Any) -> str:
    """Give the xxh3-128 checksum of the buffers, one after another, as 32 hex digits."""
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        digest.update(memoryview(buffer).cast("B"))
    return digest.hexdigest()
