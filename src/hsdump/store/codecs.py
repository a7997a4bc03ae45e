"""How a state's numbers become bytes in a shard, and back.

Letters: S = tokens of one sample, H = hidden size.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from hsdump.arrays import NUMPY_DTYPES, StateArray
from hsdump.errors import UsageError
from hsdump.schema import StateShape
from hsdump.store.format import STATE_DTYPES

CODECS = ("raw",)


class Encoded(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor ready to be written."""

    suffix: str = ""
    """Put behind the state's name: a state may need more than one tensor."""

    dtype: str
    shape: list[int]
    data: Any
    """C-contiguous buffer."""


def check_codec(codec: str) -> None:
    """Refuse a codec that this hsdump does not have.

    Raises:
        UsageError: unknown name.
    """
    if codec not in CODECS:
        raise UsageError(f"codec {codec!r} is not known", f"choose one of {', '.join(CODECS)}")


def encode_state(codec: str, state_SH: StateArray, shape: StateShape) -> list[Encoded]:
    """Encode one state of one sample."""
    check_codec(codec)
    data = np.ascontiguousarray(state_SH)
    return [Encoded(dtype=STATE_DTYPES[shape.dtype], shape=list(state_SH.shape), data=data)]


def decode_state(codec: str, parts: dict[str, Any], num_tokens: int, shape: StateShape) -> StateArray:
    """Give a state back as it left the model: a view of the bytes for `raw`, own memory otherwise.

    Args:
        parts: suffix to bytes, as `encode_state` made them.
    """
    check_codec(codec)
    return np.frombuffer(parts[""], NUMPY_DTYPES[shape.dtype]).reshape(num_tokens, shape.hidden_size)
