"""The write side of a store: samples become durable in batches, and what `commit` returned is never lost.

Samples are added by one thread. It writes them itself, one shard after the other (`add`), or has several shards written
side by side by others (`begin_add`). A batch is made durable by the same thread (`commit`), or by a second one while
the first goes on adding (`begin_commit`).

Letters: S = tokens of one sample, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, final

from hsdump.arrays import StateArray
from hsdump.keys import KeySet
from hsdump.samples import TokenSample
from hsdump.store import recovery
from hsdump.store.codecs import Encoded, check_codec
from hsdump.store.encoding import EncodedSample, SampleEncoder
from hsdump.store.format import SHARDS_FOLDER, SampleRecord, shard_path
from hsdump.store.health import Health
from hsdump.store.index import Event, Failure, SkippedRow, utc_now
from hsdump.store.manifest import Manifest
from hsdump.store.opening import OpenedStore, disk_errors, open_store
from hsdump.store.options import WriterOptions
from hsdump.store.shards import Batch, Shards
from hsdump.store.side_by_side import COMMIT_THREAD
from hsdump.store.upload import Uploader

SKIPS_AT_ONCE = 1000


@final
class StoreWriter:
    """The only writer of a store, from `open` to `close`. Use it from one thread at a time; `is_committed` and
    `is_known` may be asked from any, `encode` as well, and one other thread may call `record_failure` and the index.
    """

    def __init__(self, opened: OpenedStore, options: WriterOptions) -> None:
        """Use `open`."""
        path, manifest, index = opened.path, opened.manifest, opened.index
        self.path, self.manifest = path, manifest
        self.recovered: list[Event] = opened.events
        """What `open` had to put in order."""

        self.index, self.fs = index, options.fs
        self._lock = opened.lock
        self._committed = index.key_set()
        self._pending: set[str] = set()
        self._skips: list[SkippedRow] = []
        self._health = Health(path)
        number = recovery.next_shard_number(path, index, opened.attached)
        self._shards = Shards(path, manifest, options, number, self._health)
        self._closed = False
        self._encoder = SampleEncoder(manifest, options.codec_threads)

        self._committer: ThreadPoolExecutor | None = None
        self._under_way: Future[list[str]] | None = None
        self.url = opened.attached.part.url if opened.attached else None
        """Where shards go, besides here."""

        self._uploader = Uploader(opened.attached, index, options.fs) if opened.attached else None
        self.shards_to_upload = self._uploader.found_missing if self._uploader else 0
        """Shards that an earlier writer had committed and not uploaded."""

    @classmethod
    def open(cls, path: Path, manifest: Manifest, *, options: WriterOptions | None = None) -> StoreWriter:
        """Create a store or go on with one, after putting in order what a crash may have left.

        Raises:
            StoreError: the folder cannot be written, or holds something else.
            StoreBusy: another process writes it.
            StoreMismatch: it was made with other facts; the message lists all differences.
        """
        check_codec(manifest.codec)
        options = options or WriterOptions()
        return cls._of(open_store(Path(path), manifest, options.fs, options.remote), options)

    @classmethod
    def _of(cls, opened: OpenedStore, options: WriterOptions) -> StoreWriter:
        try:
            writer = cls(opened, options)
        except BaseException:
            opened.close()
            raise
        return writer

    @classmethod
    def reopen(cls, path: Path, *, options: WriterOptions | None = None) -> StoreWriter:
        """Open an existing store as it is, to repair it or take something out.

        Raises:
            StoreError, StoreBusy: as `open`.
        """
        options = options or WriterOptions()
        return cls._of(open_store(Path(path), None, options.fs, options.remote), options)

    def is_known(self, key: str) -> bool:
        """Tell whether a sample is committed or waits for `commit`."""
        return key in self._committed or key in self._pending

    def is_committed(self, key: str) -> bool:
        """Tell whether a sample is safely in the store. May be asked from any thread."""
        return key in self._committed

    @property
    def committed(self) -> KeySet:
        """Keys of all committed samples: the writer's own set, not to be changed."""
        return self._committed

    def failures(self) -> dict[str, Failure]:
        """Give the samples that failed and never succeeded, by key."""
        return self.index.failures()

    @property
    def pending_bytes(self) -> int:
        """Bytes added but not committed."""
        return self._shards.num_bytes

    @property
    def is_full(self) -> bool:
        """Tell whether what was added fills a shard, so that a commit now makes no small one.

        Of the shards that `begin_add` fills side by side one must be full and all at least half full; who commits then
        has at most `shards_at_once` times `shard_bytes` uncommitted, and as much in a commit under way.
        """
        return self._shards.is_full

    def add(self, sample: TokenSample, states: Sequence[StateArray], *, attempts: int = 1) -> bool:
        """Take a sample over; it is safe only when `commit` returns its key.

        Equal tokens and mask are one sample: when it is there already (two equal rows may be in flight at once), the
        first stays.

        Args:
            states: L+1 arrays [S, H] in the order of `StateShape.names`. Not needed any more on return.
            attempts: tries that the capture took, for the record.

        Returns:
            True if it was taken, False if it was there.

        Raises:
            StoreError: shapes or dtypes are not the manifest's, or the disk failed. After the disk failed the writer
                must be opened again.
        """
        return self.add_encoded(self.encode(sample, states, attempts=attempts))

    def encode(self, sample: TokenSample, states: Sequence[StateArray], *, attempts: int = 1) -> EncodedSample:
        """Do the part of `add` that needs no disk, in any thread: hash and code one sample while another is written.

        The states are needed until `add_encoded` has returned. Raises as `add`.
        """
        return self._encoder.encode(sample, states, attempts)

    def add_encoded(self, encoded: EncodedSample) -> bool:
        """Do the rest of `add`."""
        self._check_usable()
        if self.is_known(encoded.record.key):
            return False
        self._append(encoded.record, encoded.parts)
        return True

    def begin_add(self, encoded: EncodedSample, release: Callable[[], None] = lambda: None) -> Future[bool]:
        """Have the rest of `add` done by other threads, several samples at a time, for a disk that takes more than one
        file at a time can. The sample belongs to the next commit, which waits for it.

        Waits while every thread has one sample to write and another behind it. With several shards at a time samples
        stand in the store shard by shard, no longer in the order of adding.

        Args:
            release: called once in any thread when the states are needed no more, whatever comes of it.

        Returns:
            Resolves to what `add` returns when the bytes are written, or to what it raises. It cannot be cancelled.

        Raises:
            StoreError: as `add`, when the disk failed earlier.
        """
        try:
            self._check_usable()
            if not self.is_known(encoded.record.key):
                self._pending.add(encoded.record.key)
                with self._health.all_or_broken():
                    return self._shards.begin(encoded, release)
        except BaseException:
            release()
            raise
        release()
        known: Future[bool] = Future()
        known.set_result(False)
        return known

    def commit(self) -> list[str]:
        """Make everything added so far durable.

        Returns:
            Keys that are safe now, in the order of `add`; those of an earlier `begin_commit` are told there.

        Raises:
            StoreError: the disk failed; nothing of this batch counts, the writer must be opened again.
        """
        self._check_usable()
        self._settle()
        if self._shards:
            return self._finish(self._shards.take(), skips=self._take_skips())
        self._flush_skips()
        return []

    def begin_commit(self) -> Future[list[str]]:
        """Have everything added so far made durable by another thread, while the next samples are added.

        At most one commit is under way: this waits for an earlier one, so that no more than two batches are unfinished
        however slow the disk is.

        Returns:
            Resolves to the keys that are safe then, in the order of `add`, or to what `commit` would raise.

        Raises:
            StoreError: an earlier commit failed.
        """
        self._check_usable()
        self._settle()
        if self._committer is None:
            self._committer = ThreadPoolExecutor(1, COMMIT_THREAD)
        self._under_way = self._committer.submit(self._finish, self._shards.take(), skips=self._take_skips())
        return self._under_way

    def copy(self, record: SampleRecord, parts: Sequence[Any]) -> None:
        """Take a sample that is not known here over as another store holds it, without decoding it.

        Args:
            parts: the bytes of `record.tensors`, whose checksums the caller has proved.

        Raises:
            StoreError: the disk failed.
        """
        self._check_usable()
        assert not self.is_known(record.key), "ask is_known first"
        self._append_copy(record, parts)

    def replace_shard(
        self, number: int, keep: Sequence[tuple[SampleRecord, Sequence[Any]]], why: Event, *, delete: bool = False
    ) -> list[str]:
        """Put some of a shard's samples into a new one; the old shard goes to quarantine. Durable on return.

        Dying in between leaves either the old shard in place or the new one to be adopted: samples that were taken
        out never come back by themselves.

        Args:
            keep: records and proved bytes, as for `copy`.
            why: recorded; its detail becomes the reason in quarantine.
            delete: delete the old shard when all is durable, instead of leaving it in quarantine.

        Returns:
            Keys that are not in the store any more.
        """
        self._check_usable()
        self._settle()
        assert not self._shards, "commit first"
        before = [row.record.key for row in self.index.samples(number)]
        for record, parts in keep:
            self._append_copy(record, parts)
        self._finish(self._shards.take(), replaced=(number, why))
        if delete:
            with disk_errors(self.path):
                recovery.delete_quarantined(self.path, number, self.fs)
        kept = {record.key for record, _ in keep}
        gone = [key for key in before if key not in kept]
        self._committed.difference_update(gone)
        return gone

    def _append_copy(self, record: SampleRecord, parts: Sequence[Any]) -> None:
        encoded = [
            Encoded(dtype=entry.dtype, shape=entry.shape, data=data)
            for entry, data in zip(record.tensors, parts, strict=True)
        ]
        self._append(record, encoded)

    def _append(self, record: SampleRecord, parts: list[Encoded]) -> None:
        with self._health.all_or_broken():
            self._shards.append(record, parts)
        self._pending.add(record.key)

    def _finish(
        self, batch: Batch, *, replaced: tuple[int, Event] | None = None, skips: Sequence[SkippedRow] = ()
    ) -> list[str]:
        """Runs in the caller's thread or in the committer; never in both at once."""
        with self._health.all_or_broken():
            headers = self._shards.finish(batch)
            self.fs.sync_folder(self.path / SHARDS_FOLDER)
            if replaced:
                old = shard_path(self.path, replaced[0])
                if old.exists():
                    recovery.quarantine(self.path, old, replaced[1].detail, self.fs)
            with self.index.transaction():
                if replaced:
                    self.index.remove_shard(replaced[0], dropped_remote=self._uploader is not None)
                    self.index.add_event(replaced[1])
                for header, header_bytes in headers:
                    self.index.add_shard(header, header_bytes)
                self.index.add_skips(skips)
        keys = batch.keys
        self._shards.finished()
        self._committed.update(keys)  # before they leave `_pending`, so that another thread always knows them
        self._pending.difference_update(keys)
        if self._uploader is not None:
            self._uploader.committed({header.number: header.file_bytes for header, _ in headers})
        return keys

    def _settle(self) -> None:
        """Wait for a commit under way, and raise what it raised."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def record_failure(self, sample: TokenSample, reason: str, detail: str, *, attempts: int) -> None:
        """Note durably why a sample has no states. A later success replaces it; it never replaces a success."""
        self.record_failure_of(
            Failure(
                key=sample.key,
                source=sample.source,
                num_tokens=len(sample.input_ids),
                reason=reason,
                detail=detail,
                attempts=attempts,
                at=utc_now(),
            )
        )

    def record_failure_of(self, failure: Failure) -> None:
        """Note a failure as another store has it, under the same rules."""
        self._check_usable()
        if failure.key in self._committed:
            return
        with self._health.all_or_broken(), self.index.transaction():
            if self.index.sample(failure.key) is None:  # a commit under way may have been faster
                self.index.add_failure(failure)

    def record_skip(self, source: str, reason: str, detail: str) -> None:
        """Note an input row that never became a sample; durable with the next commit or close."""
        self._check_usable()
        self._skips.append(SkippedRow(source=source, reason=reason, detail=detail))
        if len(self._skips) >= SKIPS_AT_ONCE:
            self._flush_skips()

    def close(self, *, upload: bool = True) -> None:
        """Let go of the store, after a commit under way. What was added and not committed is thrown away.

        Args:
            upload: of a store with a URL: wait until all is there. Otherwise the next writer does that.

        Raises:
            StoreError: the disk failed, also in a commit that was begun and whose result nobody asked for since.
            RemoteError: not all could be uploaded; it is safe here.
        """
        if self._closed:
            return
        self._closed = True
        self._encoder.close()
        try:
            self._settle()
            if self._health.problem is None:
                self._flush_skips()
                if self._uploader is not None and upload:
                    self._uploader.finish()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._health.give_up("it was closed")  # first: what waits in threads need not be written any more
        try:
            if self._committer is not None:
                self._committer.shutdown()
            with disk_errors(self.path):
                self._shards.close()
        finally:
            self._pending.clear()
            if self._uploader is not None:
                self._uploader.close()
            self.index.close()
            self._lock.release()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(upload=error is None)

    def _check_usable(self) -> None:
        self._health.check()
        if self._uploader is not None:
            self._uploader.check()

    def _take_skips(self) -> list[SkippedRow]:
        skips, self._skips = self._skips, []
        return skips

    def _flush_skips(self) -> None:
        if skips := self._take_skips():
            with self._health.all_or_broken(), self.index.transaction():
                self.index.add_skips(skips)
