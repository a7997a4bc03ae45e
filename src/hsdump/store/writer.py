"""Adding to a store: stream samples into an open shard, commit it, never promise what is not on disk.

Order of a commit, each step durable before the next: tensors, header, fsync of the shard, rename, fsync of the folder,
index transaction. Dying before the rename leaves a `.partial` that the next opening removes; dying after it leaves a
shard that the next opening indexes. Either way a sample is there whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from hsdump.arrays import NUMPY_DTYPES, StateArray, xxh3
from hsdump.errors import StoreBusy, StoreError
from hsdump.locks import AliveLock
from hsdump.samples import TokenSample
from hsdump.store.disk import Disk, disk_errors, write_file
from hsdump.store.format import (
    HEADER_BYTES,
    INPUT_IDS,
    LOSS_MASK,
    Inventory,
    SampleRecord,
    TensorRecord,
    aligned,
    encode_header,
    header_room,
    shard_name,
)
from hsdump.store.index import Failure, Index, ShardRow
from hsdump.store.manifest import FILE_NAME as MANIFEST_FILE
from hsdump.store.manifest import Manifest, check_same, encode_manifest
from hsdump.store.recovery import open_index, quarantine_folder, recover_manifest, recover_shards, shards_folder

LOCK_FILE = "writer.lock"


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterOptions:
    """How a store is written; none of it changes what is stored."""

    shard_bytes: int = 1 << 30
    """`StoreWriter.is_full` from this size on."""

    disk: Disk = field(default_factory=Disk)


@dataclass(slots=True)
class _OpenShard:
    """The shard that is being filled."""

    number: int
    fd: int
    end: int = HEADER_BYTES
    samples: list[SampleRecord] = field(default_factory=list)
    inventory_bytes: int = 0


class StoreWriter:
    """The one writer of a store. Use from one thread; `add` then `commit`, again and again, then `close`."""

    def __init__(self, path: Path, manifest: Manifest, options: WriterOptions, lock: AliveLock) -> None:
        """Use `StoreWriter.open`."""
        self.path, self.manifest = path, manifest
        self._options, self._disk, self._lock = options, options.disk, lock
        self._manifest_json = encode_manifest(manifest).decode()
        self._shard: _OpenShard | None = None
        self._index: Index = open_index(path, self._disk)
        recover_shards(path, self._disk, self._index, manifest)
        self._index.set_meta("manifest_digest", manifest.digest)
        self._committed = set(self._index.committed_keys())
        self._adding: set[str] = set()
        self._safe: list[str] = []

    @classmethod
    def open(cls, path: Path, manifest: Manifest, *, options: WriterOptions | None = None) -> StoreWriter:
        """Create a store, or open and recover one that was made with the same settings.

        Raises:
            StoreBusy: a living process writes it.
            StoreMismatch: made with other settings; lists all differences.
            StoreError: the folder cannot be written, or is something else.
        """
        options = options or WriterOptions()
        with disk_errors(path):
            lock = _prepare_folder(path, options.disk)
            try:
                found = recover_manifest(path, options.disk)
                if found is None:
                    write_file(options.disk, path / MANIFEST_FILE, encode_manifest(manifest))
                else:
                    check_same(path, found, manifest)
                return cls(path, found or manifest, options, lock)
            except BaseException:
                lock.release()
                raise

    def __enter__(self) -> StoreWriter:  # noqa: PYI034 - typing.Self is 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_committed(self, key: str) -> bool:
        """Tell whether this sample is durable in the store."""
        return key in self._committed

    def failures(self) -> dict[str, Failure]:
        """Give the samples that failed and were not captured since."""
        return self._index.failures()

    @property
    def pending_bytes(self) -> int:
        """Bytes added and not yet committed."""
        return self._shard.end - HEADER_BYTES if self._shard else 0

    @property
    def is_full(self) -> bool:
        """Tell whether the open shard should be committed now: its size, or its header's room, is used up."""
        shard = self._shard
        if shard is None:
            return False
        per_sample = len(self.manifest.shape.names) + 2
        room = header_room(shard.inventory_bytes + len(self._manifest_json), 2 * per_sample * (len(shard.samples) + 1))
        return self.pending_bytes >= self._options.shard_bytes or room > HEADER_BYTES // 2

    def add(self, sample: TokenSample, states: Sequence[StateArray], *, attempts: int = 1) -> None:
        """Stream one sample into the open shard; `states` may be let go afterwards, durability comes with `commit`.

        Args:
            states: [S, H] each, in the order of `StateShape.names`, bits as `hsdump.arrays.StateArray` says.
            attempts: tries it took, for the record.

        Raises:
            ValueError: shapes or dtypes that this store does not hold; nothing was written.
            StoreError: the disk took less than all of it; the open shard is given up, committed shards are untouched.
        """
        if sample.key in self._committed or sample.key in self._adding:
            return
        self._check(sample, states)
        if self.is_full:
            self.commit()
        shape = self.manifest.shape
        with disk_errors(self.path):
            try:
                shard = self._shard or self._start_shard()
                tensors = [
                    self._write_tensor(shard, name, shape.dtype, state)
                    for name, state in zip(shape.names, states, strict=True)
                ]
                ids = np.ascontiguousarray(sample.input_ids, dtype="<i8")
                tensors.append(self._write_tensor(shard, INPUT_IDS, "int64", ids))
                tensors.append(self._write_tensor(shard, LOSS_MASK, "uint8", sample.loss_mask.astype(np.uint8)))
            except OSError:
                self._give_shard_up()
                raise
        record = SampleRecord(
            key=sample.key,
            source=sample.source,
            num_tokens=len(ids),
            loss_tokens=int(sample.loss_mask.sum()),
            attempts=attempts,
            tensors=tensors,
        )
        shard.samples.append(record)
        shard.inventory_bytes += 2 * len(msgspec.json.encode(record))
        self._adding.add(sample.key)

    def commit(self) -> list[str]:
        """Make everything that was added durable and visible.

        Returns:
            Keys that became safe since the last call that returned keys, shards closed by `add` included.

        Raises:
            StoreError: they are not; they are missing again and must be captured again.
        """
        if self._shard is not None:
            with disk_errors(self.path):
                self._commit_shard(self._shard)
        safe, self._safe = self._safe, []
        return safe

    def record_failure(self, sample: TokenSample, reason: str, detail: str, *, attempts: int) -> None:
        """Note that a sample has no states, durable on return. A later success replaces the note."""
        self._index.record_failure(sample, reason, detail, attempts)

    def record_skip(self, source: str, reason: str, detail: str) -> None:
        """Note an input row that never became a sample; the same row is noted once."""
        self._index.record_skip(source, reason, detail)

    def close(self) -> None:
        """Give the store back. What was added and not committed is dropped: it was never promised."""
        if self._shard is not None:
            self._give_shard_up()
        self._index.close()
        self._lock.release()

    def _check(self, sample: TokenSample, states: Sequence[StateArray]) -> None:
        shape = self.manifest.shape
        expected = (len(sample.input_ids), shape.hidden_size)
        found = [(state.shape, state.dtype) for state in states]
        if len(states) != len(shape.names) or any(f != (expected, NUMPY_DTYPES[shape.dtype]) for f in found):
            raise ValueError(f"sample {sample.key}: states are {found}, expected {len(shape.names)} of {expected}")
        if sample.loss_mask.shape != sample.input_ids.shape:
            raise ValueError(f"sample {sample.key}: mask {sample.loss_mask.shape}, tokens {sample.input_ids.shape}")

    def _start_shard(self) -> _OpenShard:
        taken = [int(p.name.split(".")[0]) for p in self._numbered_files()]
        number = max(taken, default=0) + 1
        fd = self._disk.create(self._partial(number))
        self._shard = _OpenShard(number, fd)
        return self._shard

    def _numbered_files(self) -> list[Path]:
        """All files that ever had a shard number: a number is never used again, not even a quarantined one's."""
        folders = (shards_folder(self.path), quarantine_folder(self.path))
        return [p for folder in folders for p in folder.glob("*.safetensors*") if p.name[:6].isdigit()]

    def _partial(self, number: int) -> Path:
        return shards_folder(self.path) / f"{shard_name(number)}.partial"

    def _write_tensor(self, shard: _OpenShard, name: str, dtype: str, array: StateArray) -> TensorRecord:
        data = np.ascontiguousarray(array)
        offset = aligned(shard.end)
        self._disk.write(shard.fd, data, offset)
        shard.end = offset + data.nbytes
        return TensorRecord(
            name=name, dtype=dtype, shape=list(data.shape), offset=offset, num_bytes=data.nbytes, xxh3=xxh3(data)
        )

    def _commit_shard(self, shard: _OpenShard) -> None:
        inventory = Inventory(manifest_digest=self.manifest.digest, manifest=self._manifest_json, samples=shard.samples)
        final = shards_folder(self.path) / shard_name(shard.number)
        head = encode_header(inventory, shard.end)
        try:
            self._disk.write(shard.fd, head, 0)
            self._disk.sync(shard.fd)
        except OSError:
            self._give_shard_up()
            raise
        self._disk.close(shard.fd)
        self._shard = None
        self._adding.clear()
        self._disk.rename(self._partial(shard.number), final)
        self._disk.sync_folder(final.parent)
        self._index.commit_shard(ShardRow(final.name, shard.end, xxh3(head)), shard.samples)
        keys = [sample.key for sample in shard.samples]
        self._committed.update(keys)
        self._safe = [*self._safe, *keys]

    def _give_shard_up(self) -> None:
        shard, self._shard = self._shard, None
        self._adding.clear()
        if shard is not None:
            self._disk.close(shard.fd)
            self._disk.unlink(self._partial(shard.number))


def _prepare_folder(path: Path, disk: Disk) -> AliveLock:
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path} is a file", "name a folder with --out")
    if path.is_dir() and not (path / MANIFEST_FILE).exists() and not shards_folder(path).exists():
        strangers = [entry.name for entry in path.iterdir() if entry.name != LOCK_FILE][:3]
        if strangers:
            raise StoreError(
                f"{path} is no store: it holds {', '.join(strangers)}", "name a new or empty folder with --out"
            )
    disk.make_folder(shards_folder(path))
    lock = path / LOCK_FILE
    try:
        return AliveLock(lock)
    except BlockingIOError:
        pid = lock.read_text(errors="replace").strip() or "unknown"
        raise StoreBusy(
            f"the store {path} is being written by process {pid}", "wait for it, stop it, or use another --out"
        ) from None
