"""The read side of a store: random access without a copy, beside a running writer, from any number of processes.

Letters: S = tokens of one sample, H = hidden size.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hsdump.arrays import StateArray, xxh3
from hsdump.errors import StoreCorrupt, StoreError
from hsdump.store.attach import read_local_part
from hsdump.store.codecs import decode_state
from hsdump.store.format import (
    INDEX_NAME,
    INPUT_IDS,
    LOSS_MASK,
    MANIFEST_NAME,
    SampleRecord,
    TensorEntry,
    shard_path,
)
from hsdump.store.index import Event, Failure, Index, IndexedSample, IndexedShard, RequestRow, SkippedRow
from hsdump.store.manifest import Manifest, decode_manifest
from hsdump.store.recovery import list_shards
from hsdump.store.remote import as_url
from hsdump.store.remote_reader import RemoteReader
from hsdump.store.shard_reader import map_file, read_header

MAX_MAPS = 128
"""Shards mapped at once; each costs a file descriptor."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredSample:
    """One committed sample. Arrays may be read-only views of the shard; they stay valid when the store is closed."""

    key: str
    source: str

    input_ids: NDArray[np.int64]
    """[S]"""

    loss_mask: NDArray[np.uint8]
    """[S] 1 where the target's own text is learned from."""

    states: dict[str, StateArray]
    """Name (`StateShape.names`, in that order) to [S, H] in the model's dtype, bfloat16 as uint16 bits."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


@final
class Store:
    """What was committed when this object was made, or at the last `refresh`. May be used by several threads, sent
    to other processes and kept over a fork.
    """

    def __init__(self, path: str | os.PathLike[str], *, check: bool = False) -> None:
        """Args:
        path: a folder, or a URL as fsspec takes it.
        check: prove each tensor's checksum at every access, at the price of reading all its bytes.

        Raises:
            StoreError: nothing there, or not a store; a URL that cannot be reached.
            StoreCorrupt: manifest or index are damaged.
        """
        url = as_url(path)
        self.name = url or os.fspath(path)
        """As it was given, for people."""

        self._check, self._is_url = check, url is not None
        if url is not None:
            self._remote: RemoteReader | None = RemoteReader(url)
            self.path = self._remote.fetch_facts()
        else:
            self.path = Path(path)
            part = read_local_part(self.path)
            self._remote = RemoteReader(part.url) if part else None
        self.manifest: Manifest = _read_manifest(self.path)
        self._shape = self.manifest.shape
        self._lock = threading.RLock()
        self._connect()
        self._see()

    def refresh(self) -> None:
        """See what was committed since, or published at the URL."""
        if self._is_url and self._remote is not None:
            self.path = self._remote.fetch_facts()
            with self._lock:
                self._open_index.close()
                self._connect()
        self._see()

    def _see(self) -> None:
        index = self._index()
        self._positions = np.asarray(index.positions(), dtype=np.int64)
        self._shard_bytes = {shard.number: shard.num_bytes for shard in index.shards()}

    def __len__(self) -> int:
        return len(self._positions)

    def keys(self) -> list[str]:
        """List the keys, in order of commit."""
        return self._index().keys()[: len(self)]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._find(key) is not None

    def __getitem__(self, which: str | int) -> StoredSample:
        """Give a sample by key, or by position in order of commit.

        Raises:
            KeyError, IndexError: there is none.
            StoreCorrupt: its shard is gone or damaged; names the sample.
        """
        return self._load(self.row(which))

    def __iter__(self) -> Iterator[StoredSample]:
        for position in range(len(self)):
            yield self[position]

    def row(self, which: str | int) -> IndexedSample:
        """Give what the index knows of a sample: source, lengths, shard, places and checksums.

        Raises:
            KeyError, IndexError: there is none.
        """
        if isinstance(which, str):
            found = self._find(which)
            if found is None:
                raise KeyError(which)
            return found
        row = self._index().sample_at(int(self._positions[which]))
        if row is None:
            raise IndexError(which)
        return row

    def tokens(self, which: str | int) -> tuple[str, NDArray[np.int64], NDArray[np.uint8]]:
        """Give a sample's key, token ids [S] and loss mask [S] without decoding its states.

        Raises:
            KeyError, IndexError: there is none.
            StoreCorrupt: its shard is gone or damaged.
        """
        row = self.row(which)
        window = self._window(row)
        entries = {entry.name: entry for entry in row.record.tensors}
        ids = np.frombuffer(window.view(entries[INPUT_IDS]), "<i8")
        return row.record.key, ids, np.frombuffer(window.view(entries[LOSS_MASK]), np.uint8)

    def proved_parts(self, row: IndexedSample) -> list[memoryview]:
        """Give the bytes of a sample's tensors as the shard holds them, after their checksums held.

        Raises:
            StoreCorrupt: names the sample and its damaged tensors.
        """
        window = self._window(row)
        _prove(row.record, window, shard_path(self.path, row.shard).name)
        return [window.view(entry) for entry in row.record.tensors]

    @contextmanager
    def shard_file(self, number: int) -> Iterator[Path]:
        """Give a shard as a file, fetched for as long as the body runs where it is not here; it may not exist."""
        path = shard_path(self.path, number)
        if path.exists() or self._remote is None:
            yield path
        else:
            with self._remote.fetched(number) as fetched:
                yield fetched

    @property
    def url(self) -> str | None:
        """Where shards are that are not in the folder, if the store has such a place."""
        return self._remote.url if self._remote else None

    @property
    def is_whole(self) -> bool:
        """Tell whether all shards are in the folder, none only at a URL."""
        return self._remote is None or all(shard_path(self.path, number).exists() for number in self._shard_bytes)

    def rows_of(self, shard: int) -> list[IndexedSample]:
        """Give what the index knows of one shard's samples."""
        last = self._positions[-1] if len(self) else -1
        return [row for row in self._index().samples(shard) if row.position <= last]

    def position_of(self, place: int) -> int:
        """Give the index's lasting number of the sample at a place in the order of commit."""
        return int(self._positions[place])

    def shards(self) -> list[IndexedShard]:
        return self._index().shards()

    def failures(self) -> dict[str, Failure]:
        """Give the samples that failed, by key."""
        return self._index().failures()

    def requests(self) -> list[RequestRow]:
        """List the samples that a run has on their way, as it last noted them."""
        return self._index().requests()

    def skips(self) -> Counter[str]:
        """Count input rows that never became samples, by reason."""
        return self._index().skips()

    def skipped_rows(self) -> list[SkippedRow]:
        return self._index().skipped_rows()

    def events(self) -> list[Event]:
        """List what recoveries and repairs did to this store."""
        return self._index().events()

    def totals(self) -> tuple[int, int, int]:
        """Count samples, tokens and learned tokens."""
        return self._index().totals()

    def lengths(self) -> NDArray[np.int64]:
        """Give the tokens of each sample, [len(self)], in order of commit, from the index alone."""
        return np.asarray(self._index().lengths()[: len(self)], dtype=np.int64)

    def longest(self) -> int:
        """Give the tokens of the longest sample; 0 for an empty store."""
        return int(self.lengths().max(initial=0))

    def close(self) -> None:
        """Let go of index and maps; arrays handed out stay valid."""
        with self._lock:
            self._maps.clear()
            self._open_index.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.name, "_check": self._check, "_positions": self._positions}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Store.__init__(self, state["path"], check=state["_check"])
        self._positions = state["_positions"]

    def _connect(self) -> None:
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._pid = os.getpid()
        self._open_index = Index.open_to_read(self.path / INDEX_NAME) or _index_of_headers(self.path)

    def _index(self) -> Index:
        """sqlite connections do not survive a fork, so a child makes its own."""
        if self._pid != os.getpid():
            self._lock = threading.RLock()
            self._connect()
        return self._open_index

    def _find(self, key: str) -> IndexedSample | None:
        row = self._index().sample(key)
        return row if row is not None and len(self) and row.position <= self._positions[-1] else None

    def _load(self, row: IndexedSample) -> StoredSample:
        record = row.record
        window = self._window(row)
        entries = {entry.name: entry for entry in record.tensors}
        if self._check:
            _prove(record, window, shard_path(self.path, row.shard).name)
        states = {}
        for name in self._shape.names:
            parts = {
                entry.name[len(name) :]: window.view(entry)
                for entry in record.tensors
                if entry.name == name or entry.name.startswith(name + ".")
            }
            states[name] = decode_state(entries[name].codec, parts, record.num_tokens, self._shape)
        return StoredSample(
            key=record.key,
            source=record.source,
            input_ids=np.frombuffer(window.view(entries[INPUT_IDS]), "<i8"),
            loss_mask=np.frombuffer(window.view(entries[LOSS_MASK]), np.uint8),
            states=states,
        )

    def _window(self, row: IndexedSample) -> _Window:
        """Give a sample's bytes: of the mapped shard, or read from the URL where it is not here."""
        number = row.shard
        try:
            try:
                return _Window(memoryview(self._map(number)), 0)
            except FileNotFoundError:
                if self._remote is None:
                    raise
            start = min(entry.offset for entry in row.record.tensors)
            end = max(entry.offset + entry.num_bytes for entry in row.record.tensors)
            return _Window(memoryview(self._remote.read(number, start, end)), start)
        except (StoreCorrupt, OSError, KeyError) as error:
            reason = error.what if isinstance(error, StoreCorrupt) else str(error)
            what = f"sample {row.record.key} ({row.record.source}) cannot be read: {reason}"
            raise StoreCorrupt(what, "take it out with `hsdump store scrub --repair`, then extract again") from None

    def _map(self, number: int) -> mmap.mmap:
        with self._lock:
            if number in self._maps:
                self._maps.move_to_end(number)
                return self._maps[number]
            if number not in self._shard_bytes:
                self._shard_bytes = {shard.number: shard.num_bytes for shard in self._index().shards()}
            self._maps[number] = map_file(shard_path(self.path, number), self._shard_bytes[number])
            while len(self._maps) > MAX_MAPS:
                self._maps.popitem(last=False)  # arrays that still look into it keep it alive
            return self._maps[number]


@dataclass(frozen=True, slots=True)
class _Window:
    """A stretch of a shard."""

    data: memoryview
    start: int
    """Where it begins in the shard."""

    def view(self, entry: TensorEntry) -> memoryview:
        first = entry.offset - self.start
        return self.data[first : first + entry.num_bytes]


def _prove(record: SampleRecord, window: _Window, where: str) -> None:
    damaged = [entry.name for entry in record.tensors if xxh3(window.view(entry)) != entry.checksum]
    if damaged:
        what = f"sample {record.key} ({record.source}) in {where} has wrong bytes in {', '.join(damaged)}"
        raise StoreCorrupt(what, "take it out with `hsdump store scrub --repair`, then extract again")


def _read_manifest(path: Path) -> Manifest:
    place = path / MANIFEST_NAME
    if not place.is_file():
        what = f"{path} is not a store: it has no {MANIFEST_NAME}" if path.exists() else f"no {path}"
        raise StoreError(what, "name the folder that `hsdump extract --out` wrote")
    try:
        return decode_manifest(place.read_bytes(), str(place))
    except OSError as error:
        raise StoreError(f"{place}: {error.strerror}", "see that you may read the store") from error


def _index_of_headers(store: Path) -> Index:
    """A deleted index is made again at the next writing open; until then its like is held in memory."""
    index = Index.in_memory()
    for path in list_shards(store).values():
        header, header_bytes = read_header(path)
        with index.transaction():
            index.add_shard(header, header_bytes)
    return index
