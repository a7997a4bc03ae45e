"""From a sample and its states to the tensors of a shard.

Letters: S = tokens of one sample, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hsdump.arrays import NUMPY_DTYPES, StateArray, xxh3
from hsdump.errors import StoreError
from hsdump.samples import TokenSample
from hsdump.store.codecs import Encoded, EncodedState, encode_state
from hsdump.store.format import INPUT_IDS, LOSS_MASK, SampleRecord, TensorEntry, tensor_bytes
from hsdump.store.manifest import Manifest


@dataclass(frozen=True, slots=True, eq=False)
class EncodedSample:
    """A sample that only has to be written."""

    record: SampleRecord
    """With checksums; offsets are the shard's to give."""

    parts: list[Encoded]
    """Tensors in the record's order; of codec raw they are views of the states that came in."""


@final
class SampleEncoder:
    """Checks samples against a manifest and encodes their states, side by side where the codec takes time. Safe in
    threads.
    """

    def __init__(self, manifest: Manifest, threads: int) -> None:
        self._shape, self._codec = manifest.shape, manifest.codec
        self._pool = None if self._codec == "raw" else ThreadPoolExecutor(threads, "hsdump-codec")

    def encode(self, sample: TokenSample, states: Sequence[StateArray], attempts: int) -> EncodedSample:
        """Encode a sample and take its checksums.

        Args:
            states: arrays [S, H] in the order of `StateShape.names`.

        Raises:
            StoreError: shapes or dtypes are not the manifest's.
        """
        self._check(sample, states)
        parts = {
            INPUT_IDS: [_plain("I64", np.ascontiguousarray(sample.input_ids, "<i8"))],
            LOSS_MASK: [_plain("U8", np.ascontiguousarray(sample.loss_mask, np.uint8))],
        }
        errors = {}
        for name, encoded in zip(self._shape.names, self._encode_all(states), strict=True):
            parts[name] = encoded.parts
            if encoded.error is not None:
                errors[name] = encoded.error
        record = _record(sample, parts, self._codec, attempts, errors)
        return EncodedSample(record, [part for group in parts.values() for part in group])

    def _check(self, sample: TokenSample, states: Sequence[StateArray]) -> None:
        """Refuse what does not fit the manifest.

        Raises:
            StoreError: names every state that is of another shape or dtype.
        """
        num_tokens, names = len(sample.input_ids), self._shape.names
        want = (num_tokens, self._shape.hidden_size)
        dtype = NUMPY_DTYPES[self._shape.dtype]
        wrong = [
            f"{name} is {state.dtype} {list(state.shape)}"
            for name, state in zip(names, states, strict=False)
            if state.shape != want or state.dtype != dtype
        ]
        if len(states) != len(names):
            wrong = [f"there are {len(states)} states instead of {len(names)}"]
        if len(sample.loss_mask) != num_tokens or num_tokens == 0:
            wrong.append(f"{num_tokens} tokens, {len(sample.loss_mask)} mask values")
        if wrong:
            what = f"sample {sample.key} ({sample.source}) does not fit the store: {'; '.join(wrong)}"
            raise StoreError(what, f"every state must be {dtype} {list(want)}, as the manifest says")

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _encode_all(self, states: Sequence[StateArray]) -> Iterable[EncodedState]:
        """Encode states side by side; numpy and blosc2 let go of the interpreter lock."""
        codec, shape = self._codec, self._shape
        if self._pool is None:
            return [encode_state(codec, state_SH, shape) for state_SH in states]
        return self._pool.map(lambda state_SH: encode_state(codec, state_SH, shape), states)


def _plain(dtype: str, data: NDArray[Any]) -> Encoded:
    return Encoded(dtype=dtype, shape=list(data.shape), data=data)


def _record(
    sample: TokenSample, parts: dict[str, list[Encoded]], codec: str, attempts: int, errors: dict[str, float]
) -> SampleRecord:
    entries = [
        TensorEntry(
            name=name + part.suffix,
            codec="raw" if name in {INPUT_IDS, LOSS_MASK} else codec,
            dtype=part.dtype,
            shape=part.shape,
            offset=0,
            num_bytes=tensor_bytes(part.dtype, part.shape),
            checksum=xxh3(part.data),
        )
        for name, group in parts.items()
        for part in group
    ]
    return SampleRecord(
        key=sample.key,
        source=sample.source,
        num_tokens=len(sample.input_ids),
        num_learned=int(np.count_nonzero(sample.loss_mask)),
        attempts=attempts,
        tensors=entries,
        errors=errors,
    )
