"""Reading a store: by key or position, states straight from the page cache, while a writer may be at work.

Letters: S = tokens of one sample, H = hidden size.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsdump.arrays import NUMPY_DTYPES, StateArray
from hsdump.errors import StoreCorrupt, StoreError
from hsdump.store.format import INPUT_IDS, LOSS_MASK, TensorRecord
from hsdump.store.index import Failure, Index, SampleRow, SkipRow
from hsdump.store.manifest import Manifest, read_manifest
from hsdump.store.recovery import shards_folder


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredSample:
    """One sample; row t of every array is token t. Arrays are read-only views of the shard's memory map."""

    key: str
    source: str

    input_ids: NDArray[np.int64]
    """[S]"""

    loss_mask: NDArray[np.uint8]
    """[S]"""

    states: dict[str, StateArray]
    """name -> [S, H], names and order of `StateShape.names`; bfloat16 as its uint16 bits."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


class Store:
    """A store, opened for reading. Sees the samples that were committed when it was opened."""

    def __init__(self, path: Path | str) -> None:
        """Raises:
        StoreError: no store there.
        StoreCorrupt: its manifest or index cannot be read.
        """
        self.path = Path(path)
        manifest = read_manifest(self.path)
        if manifest is None:
            raise StoreError(f"{self.path} is no store (it has no manifest.json)", "name a folder that extract wrote")
        self.manifest: Manifest = manifest
        self._index = Index(self.path, read_only=True)
        self._keys = self._index.committed_keys()
        self._present = frozenset(self._keys)
        self._maps: dict[str, memoryview] = {}

    def __enter__(self) -> Store:  # noqa: PYI034 - typing.Self is 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the index. Arrays that were handed out stay valid."""
        self._index.close()
        self._maps.clear()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._present

    def __iter__(self) -> Iterator[StoredSample]:
        for row in self._index.samples():
            yield self.load(row)

    def __getitem__(self, which: str | int) -> StoredSample:
        """Give a sample by key or by position in commit order.

        Raises:
            KeyError, IndexError: not there.
        """
        key = self._keys[which] if isinstance(which, int) else which
        row = self._index.sample(key)
        if row is None:
            raise KeyError(key)
        return self.load(row)

    def keys(self) -> list[str]:
        """Give all keys in commit order."""
        return list(self._keys)

    def rows(self) -> Iterator[SampleRow]:
        """Give what the index knows of each sample, without touching a shard."""
        return self._index.samples()

    def failures(self) -> dict[str, Failure]:
        return self._index.failures()

    def skips(self) -> list[SkipRow]:
        return self._index.skips()

    def events(self) -> list[str]:
        """Give what recovery ever did to this store."""
        return self._index.events()

    def load(self, row: SampleRow) -> StoredSample:
        """Map one sample's tensors.

        Raises:
            StoreCorrupt: the shard is gone or shorter than the index says.
        """
        arrays = {tensor.name: self._array(row.shard, tensor) for tensor in row.record.tensors}
        ids, mask = arrays.pop(INPUT_IDS), arrays.pop(LOSS_MASK)
        return StoredSample(key=row.record.key, source=row.record.source, input_ids=ids, loss_mask=mask, states=arrays)

    def _array(self, shard: str, tensor: TensorRecord) -> StateArray:
        view = self._map(shard)[tensor.offset : tensor.offset + tensor.num_bytes]
        if len(view) != tensor.num_bytes:
            raise StoreCorrupt(f"{shard} is shorter than its index says", f"run hsdump verify {self.path}")
        dtype: np.dtype[Any] = _NUMPY.get(tensor.dtype) or NUMPY_DTYPES[tensor.dtype]
        return np.frombuffer(view, dtype=dtype).reshape(tensor.shape)

    def _map(self, shard: str) -> memoryview:
        if shard not in self._maps:
            try:
                with (shards_folder(self.path) / shard).open("rb") as file:
                    self._maps[shard] = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
            except (FileNotFoundError, ValueError) as error:
                raise StoreCorrupt(
                    f"shard {shard} of {self.path} cannot be mapped ({error})", f"run hsdump verify {self.path}"
                ) from error
        return self._maps[shard]


_NUMPY: dict[str, np.dtype[Any]] = {"int64": np.dtype("<i8"), "uint8": np.dtype("u1")}
