"""How a state's numbers become bytes in a shard, and back. docs/format.md describes each codec's tensors.

| codec    | tensors of state `layer2`                    | size of bfloat16 | loss                                  |
|----------|----------------------------------------------|------------------|---------------------------------------|
| `raw`    | `layer2` in the model's dtype                | 1                | none                                  |
| `blosc2` | `layer2` U8, compressed chunks end to end    | about 0.7        | none                                  |
| `fp8`    | `layer2` F8_E4M3, `layer2.scale` F32 a token | 0.5 + 2/H        | about 2.6 % of a value, recorded      |

One fp8 scale per token AND layer: the last layers' values are many times the early ones', and a scale over all layers
would leave the early ones few codes.

Letters: S = tokens of one sample, H = hidden size.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
import numpy as np

from hsdump.arrays import NUMPY_DTYPES, StateArray
from hsdump.errors import StoreCorrupt, UsageError
from hsdump.schema import DTYPE_BYTES, StateShape
from hsdump.store.format import STATE_DTYPES
from hsdump.store.fp8 import decode_fp8, encode_fp8, from_float32

CODECS = ("raw", "blosc2", "fp8")

SCALE_SUFFIX = ".scale"

CHUNK_BYTES = 16 << 20
"""Uncompressed bytes of one blosc2 chunk, at least one row. Bounds what decoding takes beside the result."""

ZSTD_LEVEL = 1
"""Measured on bfloat16 rows: higher levels take 5 to 10 times as long and come out larger, not smaller."""

_BLOSC_HEADER = 32
"""Bytes before a blosc2 chunk's data: 4..8 uncompressed size, 12..16 size of the whole chunk, little endian."""


class Encoded(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor ready to be written."""

    suffix: str = ""
    """Put behind the state's name: a state may need more than one tensor."""

    dtype: str
    shape: list[int]
    data: Any
    """C-contiguous buffer."""


class EncodedState(msgspec.Struct, frozen=True, kw_only=True):
    """All tensors of one state."""

    parts: list[Encoded]
    error: float | None = None
    """Lossy codecs: relative error."""


def check_codec(codec: str) -> None:
    """Refuse a codec that this hsdump does not have.

    Raises:
        UsageError: unknown name, or its library is not installed.
    """
    if codec not in CODECS:
        raise UsageError(f"codec {codec!r} is not known", f"choose one of {', '.join(CODECS)}")
    if codec == "blosc2":
        _blosc2()


def encode_state(codec: str, state_SH: StateArray, shape: StateShape) -> EncodedState:
    """Encode one state of one sample. Safe in threads."""
    if codec == "fp8":
        codes, scales, error = encode_fp8(state_SH, shape.dtype)
        parts = [
            Encoded(dtype="F8_E4M3", shape=list(codes.shape), data=codes),
            Encoded(suffix=SCALE_SUFFIX, dtype="F32", shape=[len(scales)], data=scales),
        ]
        return EncodedState(parts=parts, error=error)
    data = np.ascontiguousarray(state_SH)
    if codec == "blosc2":
        compressed = _compress(data, DTYPE_BYTES[shape.dtype])
        return EncodedState(parts=[Encoded(dtype="U8", shape=[len(compressed)], data=compressed)])
    return EncodedState(parts=[Encoded(dtype=STATE_DTYPES[shape.dtype], shape=list(data.shape), data=data)])


def decode_state(codec: str, parts: dict[str, Any], num_tokens: int, shape: StateShape) -> StateArray:
    """Give a state back in the model's dtype: a view of the bytes for `raw`, own memory otherwise.

    Args:
        parts: suffix to bytes, as `encode_state` made them.

    Raises:
        StoreCorrupt: bytes that this codec does not write.
        ValueError: raw bytes of another shape.
    """
    want = (num_tokens, shape.hidden_size)
    if codec == "raw":
        return np.frombuffer(parts[""], NUMPY_DTYPES[shape.dtype]).reshape(want)
    if codec == "blosc2":
        return _decompress(memoryview(parts[""]).cast("B"), want, NUMPY_DTYPES[shape.dtype])
    if codec == "fp8":
        if set(parts) != {"", SCALE_SUFFIX}:
            raise _corrupt("fp8", f"it has the parts {sorted(parts)}")
        codes = np.frombuffer(parts[""], np.uint8).reshape(want)
        scales = np.frombuffer(parts[SCALE_SUFFIX], "<f4").reshape(num_tokens)
        return from_float32(decode_fp8(codes, scales), shape.dtype)
    raise _corrupt(codec, "this hsdump does not have that codec")


_THREADS_A_STATE = max(1, len(os.sched_getaffinity(0)) // 4)
"""The caller runs the states of a sample side by side, four of them usually."""


def _compress(data: StateArray, item_bytes: int) -> bytes:
    blosc2 = _blosc2()
    rows = max(1, CHUNK_BYTES // max(data[:1].nbytes, 1))
    return b"".join(
        blosc2.compress2(
            data[start : start + rows],
            codec=blosc2.Codec.ZSTD,
            clevel=ZSTD_LEVEL,
            typesize=item_bytes,
            nthreads=_THREADS_A_STATE,
            filters=[blosc2.Filter.SHUFFLE],
            filters_meta=[0],
        )
        for start in range(0, len(data), rows)
    )


def _decompress(data: memoryview, want: tuple[int, int], dtype: np.dtype[Any]) -> StateArray:
    """Undo `_compress`; sizes are checked before the library sees a chunk."""
    blosc2 = _blosc2()
    result = np.empty(want, dtype)
    left = result.reshape(-1).view(np.uint8)
    while data:
        size, packed = (int.from_bytes(data[at : at + 4], "little") for at in (4, 12))
        if not _BLOSC_HEADER <= packed <= len(data) or not 0 < size <= len(left):
            raise _corrupt("blosc2", f"a chunk of {packed} bytes for {size}, {len(data)} are left for {len(left)}")
        try:
            blosc2.decompress2(bytes(data[:packed]), dst=left[:size])
        except (RuntimeError, ValueError) as error:
            raise _corrupt("blosc2", str(error)) from error
        data, left = data[packed:], left[size:]
    if len(left):
        raise _corrupt("blosc2", f"{len(left)} bytes are missing")
    return result


def _blosc2() -> Any:
    try:
        import blosc2
    except ImportError:
        fix = "install it (pip install 'hsdump[blosc2]'), or use the codec raw or fp8"
        raise UsageError("codec 'blosc2' needs the blosc2 package, which is not installed", fix) from None
    return blosc2


def _corrupt(codec: str, what: str) -> StoreCorrupt:
    return StoreCorrupt(f"a state of codec {codec!r} cannot be decoded: {what}", "look with `hsdump verify STORE`")
