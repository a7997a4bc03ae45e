"""The write side of a store: samples become durable in batches, and what `commit` returned is never lost.

Letters: S = tokens of one sample, H = hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hsdump.arrays import NUMPY_DTYPES, StateArray
from hsdump.errors import StoreError, StoreMismatch
from hsdump.samples import TokenSample
from hsdump.store import recovery
from hsdump.store.codecs import Encoded, EncodedState, check_codec, encode_state
from hsdump.store.format import (
    INPUT_IDS,
    LOCK_NAME,
    LOSS_MASK,
    MANIFEST_NAME,
    OWN_NAMES,
    SHARDS_FOLDER,
    SampleRecord,
    TensorEntry,
    tensor_bytes,
)
from hsdump.store.fs import Fs
from hsdump.store.index import Event, Failure, Index, SkippedRow, utc_now
from hsdump.store.lock import WriterLock
from hsdump.store.manifest import Manifest, differences, encode_manifest
from hsdump.store.shard_writer import ShardWriter

SKIPS_AT_ONCE = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterOptions:
    """How a store is written; none of it changes what a reader sees."""

    shard_bytes: int = 1 << 30
    """A shard that reached this size takes no further sample. One commit may hold several shards."""

    codec_threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """States encoded at a time by a codec other than raw."""

    fs: Fs = field(default_factory=Fs)
    """Where disk operations go; tests break it."""


@final
class StoreWriter:
    """The only writer of a store, from `open` to `close`. Use it from one thread at a time."""

    def __init__(self, path: Path, manifest: Manifest, index: Index, lock: WriterLock, options: WriterOptions) -> None:
        """Use `open`."""
        self.path, self.manifest = path, manifest
        self.recovered: list[Event] = []
        """What `open` had to put in order."""

        self._index, self._lock, self._options, self._fs = index, lock, options, options.fs
        self._shape = manifest.shape
        self._committed = set(index.keys())
        self._pending: set[str] = set()
        self._shards: list[ShardWriter] = []
        self._skips: list[SkippedRow] = []
        self._next_number = recovery.next_shard_number(path, index)
        self._broken: str | None = None
        self._closed = False
        self._pool: ThreadPoolExecutor | None = None

    @classmethod
    def open(cls, path: Path, manifest: Manifest, *, options: WriterOptions | None = None) -> StoreWriter:
        """Create a store or go on with one, after putting in order what a crash may have left.

        Raises:
            StoreError: the folder cannot be written, or holds something else.
            StoreBusy: another process writes it.
            StoreMismatch: it was made with other facts; the message lists all differences.
        """
        options = options or WriterOptions()
        check_codec(manifest.codec)
        path = Path(path)
        lock = _take_folder(path, options.fs)
        events: list[Event] = []
        try:
            with disk_errors(path):
                stored = recovery.load_manifest(path, options.fs, events)
                if stored is None:
                    options.fs.write_file(path / MANIFEST_NAME, encode_manifest(manifest))
                    stored = manifest
                _refuse_other(path, stored, manifest)
                index = recovery.open_index(path, stored, options.fs, events)
                try:
                    recovery.recover(path, index, stored, options.fs, events)
                    writer = cls(path, stored, index, lock, options)
                except BaseException:
                    index.close()
                    raise
        except BaseException:
            lock.release()
            raise
        writer.recovered = events
        return writer

    def is_committed(self, key: str) -> bool:
        """Tell whether a sample is safely in the store. May be asked from any thread."""
        return key in self._committed

    @property
    def committed(self) -> frozenset[str]:
        """Keys of all committed samples."""
        return frozenset(self._committed)

    def failures(self) -> dict[str, Failure]:
        """Give the samples that failed and never succeeded, by key."""
        return self._index.failures()

    @property
    def pending_bytes(self) -> int:
        """Bytes added but not committed."""
        return sum(shard.data_bytes for shard in self._shards)

    @property
    def is_full(self) -> bool:
        """Tell whether what was added fills a shard, so that a commit now makes no small one."""
        return self.pending_bytes >= self._options.shard_bytes

    def add(self, sample: TokenSample, states: Sequence[StateArray], *, attempts: int = 1) -> None:
        """Take a sample over; it is safe only when `commit` returns its key.

        Args:
            states: L+1 arrays [S, H] in the order of `StateShape.names`. Not needed any more on return.
            attempts: tries that the capture took, for the record.

        Raises:
            StoreError: shapes or dtypes are not the manifest's, the sample is in the store already, or the disk
                failed. After the disk failed the writer must be opened again.
        """
        self._check_usable()
        self._check(sample, states)
        parts = {
            INPUT_IDS: [_plain("I64", np.ascontiguousarray(sample.input_ids, "<i8"))],
            LOSS_MASK: [_plain("U8", np.ascontiguousarray(sample.loss_mask, np.uint8))],
        }
        errors = {}
        for name, encoded in zip(self._shape.names, self._encode(states), strict=True):
            parts[name] = encoded.parts
            if encoded.error is not None:
                errors[name] = encoded.error
        record = _record(sample, parts, self.manifest.codec, attempts, errors)
        with self._all_or_broken():
            flat = [part for group in parts.values() for part in group]
            self._shard_for(record).append(record, flat)
        self._pending.add(sample.key)

    def commit(self) -> list[str]:
        """Make everything added so far durable.

        Returns:
            Keys that are safe now, in the order of `add`.

        Raises:
            StoreError: the disk failed; nothing of this batch counts, the writer must be opened again.
        """
        self._check_usable()
        self._flush_skips()
        if not self._shards:
            return []
        with self._all_or_broken():
            headers = [shard.finish() for shard in self._shards]
            self._fs.sync_folder(self.path / SHARDS_FOLDER)
            with self._index.transaction():
                for header, header_bytes in headers:
                    self._index.add_shard(header, header_bytes)
        keys = [record.key for header, _ in headers for record in header.samples]
        self._shards.clear()
        self._pending.clear()
        self._committed.update(keys)
        return keys

    def record_failure(self, sample: TokenSample, reason: str, detail: str, *, attempts: int) -> None:
        """Note durably why a sample has no states. A later success replaces it; it never replaces a success."""
        self._check_usable()
        if sample.key in self._committed:
            return
        failure = Failure(
            key=sample.key,
            source=sample.source,
            num_tokens=len(sample.input_ids),
            reason=reason,
            detail=detail,
            attempts=attempts,
            at=utc_now(),
        )
        with self._all_or_broken(), self._index.transaction():
            self._index.add_failure(failure)

    def record_skip(self, source: str, reason: str, detail: str) -> None:
        """Note an input row that never became a sample; durable with the next commit or close."""
        self._check_usable()
        self._skips.append(SkippedRow(source=source, reason=reason, detail=detail))
        if len(self._skips) >= SKIPS_AT_ONCE:
            self._flush_skips()

    def close(self) -> None:
        """Let go of the store. What was added and not committed is thrown away."""
        if self._closed:
            return
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown()
        try:
            if self._broken is None:
                self._flush_skips()
            with disk_errors(self.path):
                self._discard_pending()
        finally:
            self._index.close()
            self._lock.release()
            self._broken = self._broken or "it was closed"

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, states: Sequence[StateArray]) -> Iterable[EncodedState]:
        """Encode states side by side; numpy and blosc2 let go of the interpreter lock."""
        codec, shape = self.manifest.codec, self._shape
        if codec == "raw":
            return [encode_state(codec, state_SH, shape) for state_SH in states]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._options.codec_threads, "hsdump-codec")
        return self._pool.map(lambda state_SH: encode_state(codec, state_SH, shape), states)

    def _shard_for(self, record: SampleRecord) -> ShardWriter:
        if self._shards:
            last = self._shards[-1]
            if last.data_bytes < self._options.shard_bytes and last.has_room_for(record):
                return last
        shard = ShardWriter(self.path, self._next_number, self.manifest, self._fs, self._options.shard_bytes)
        self._next_number += 1
        self._shards.append(shard)
        return shard

    def _check(self, sample: TokenSample, states: Sequence[StateArray]) -> None:
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
        if sample.key in self._committed or sample.key in self._pending:
            what = f"sample {sample.key} ({sample.source}) is in the store already"
            raise StoreError(what, "ask is_committed(key) before capturing")

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise StoreError(f"{self.path} cannot be written any more: {self._broken}", "open it again")

    def _flush_skips(self) -> None:
        if self._skips:
            with self._all_or_broken(), self._index.transaction():
                self._index.add_skips(self._skips)
            self._skips.clear()

    def _discard_pending(self) -> None:
        for shard in self._shards:
            shard.discard()
        self._shards.clear()
        self._pending.clear()

    @contextmanager
    def _all_or_broken(self) -> Iterator[None]:
        """After a failed write or fsync nobody knows what the kernel kept, so this writer must not go on."""
        try:
            with disk_errors(self.path):
                yield
        except BaseException as error:
            self._broken = str(error.what if isinstance(error, StoreError) else error) or type(error).__name__
            raise


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Say what the disk refused in words of ours."""
    try:
        yield
    except OSError as error:
        what = f"{path}: {error.strerror or error} ({error.filename or 'while writing'})"
        fix = "make room or repair the disk, then run the same command again; committed samples are safe"
        raise StoreError(what, fix) from error


def _take_folder(path: Path, fs: Fs) -> WriterLock:
    """Make the folder where needed, prove that it can be written, take the lock."""
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path} is a file", "name a folder for the store")
    strangers = sorted(entry.name for entry in path.iterdir() if entry.name not in OWN_NAMES) if path.is_dir() else []
    if strangers and not (path / MANIFEST_NAME).exists():
        what = f"{path} is no store and not empty: it holds {', '.join(strangers[:3])}"
        raise StoreError(what, "name a new or empty folder")
    try:
        fs.make_folder(path / SHARDS_FOLDER)
        return WriterLock(path / LOCK_NAME)
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror or error}"
        raise StoreError(what, "name a writable folder on a disk with room, or change its rights") from error


def _refuse_other(path: Path, stored: Manifest, asked: Manifest) -> None:
    found = differences(stored, asked)
    if found:
        what = f"{path} was made with other settings:\n    " + "\n    ".join(found)
        raise StoreMismatch(what, "use the same settings again, or name another folder for this data set")


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
            checksum="",
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
