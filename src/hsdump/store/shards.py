"""A writer's unfinished shards: which one a sample goes to, and what belongs to one commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from hsdump.store.codecs import Encoded
from hsdump.store.encoding import EncodedSample
from hsdump.store.format import SampleRecord, ShardHeader
from hsdump.store.health import Health
from hsdump.store.manifest import Manifest
from hsdump.store.options import WriterOptions
from hsdump.store.shard_writer import ShardWriter
from hsdump.store.side_by_side import Filling, SideBySide


@dataclass(slots=True, eq=False)
class Batch:
    """What belongs to one commit."""

    keys: list[str] = field(default_factory=list)
    """In the order of adding."""

    shards: list[ShardWriter] = field(default_factory=list)
    """Filled one after the other."""

    side_by_side: list[Filling] = field(default_factory=list)

    def all(self) -> list[ShardWriter]:
        return [*self.shards, *(one.shard for one in self.side_by_side)]

    def discard(self) -> None:
        """Throw all shards away; those behind one that cannot be thrown away, too."""
        with ExitStack() as stack:
            for shard in reversed(self.all()):
                stack.callback(shard.discard)


@final
class Shards:
    """Belongs to the writer's thread; only `finish` may run beside it in another."""

    def __init__(self, path: Path, manifest: Manifest, options: WriterOptions, number: int, health: Health) -> None:
        """Args:
        number: of the first shard.
        """
        self._path, self._manifest, self._options = path, manifest, options
        self._next_number = number
        self._batch = Batch()
        self._finishing = Batch()
        """Of the commit under way; after a failed one what it left."""

        self._threads = SideBySide(options.shards_at_once, options.shard_bytes, self._new, health)

    def __bool__(self) -> bool:
        """Tell whether anything waits for its commit."""
        return bool(self._batch.shards or self._batch.side_by_side)

    @property
    def num_bytes(self) -> int:
        """Bytes that wait for their commit."""
        return sum(shard.data_bytes for shard in self._batch.all())

    @property
    def is_full(self) -> bool:
        """Tell whether a commit makes no small shard.

        Of several that are filled side by side one must be full and none less than half so: those that began later
        would always be smaller than those before. That leaves at most their number times a shard's size uncommitted.
        """
        shard_bytes, beside = self._options.shard_bytes, self._batch.side_by_side
        if len(beside) < 2:
            return self.num_bytes >= shard_bytes
        sizes = [shard_bytes if one.is_closed else one.shard.data_bytes for one in beside]
        return max(sizes) >= shard_bytes and 2 * min(sizes) >= shard_bytes

    def append(self, record: SampleRecord, parts: list[Encoded]) -> None:
        """Write a sample in this thread, into one shard after the other."""
        shards = self._batch.shards
        if not (shards and shards[-1].data_bytes < self._options.shard_bytes and shards[-1].has_room_for(record)):
            shards.append(self._new())
        shards[-1].append(record, parts)
        self._batch.keys.append(record.key)

    def begin(self, encoded: EncodedSample, release: Callable[[], None]) -> Future[bool]:
        """Have a sample written by another thread; see `SideBySide.add`."""
        self._batch.keys.append(encoded.record.key)
        return self._threads.add(self._batch.side_by_side, encoded, release)

    def take(self) -> Batch:
        """Give what the next commit makes durable. The one before must be done."""
        self._finishing, self._batch = self._batch, Batch()
        return self._finishing

    def finish(self, batch: Batch) -> list[tuple[ShardHeader, int]]:
        """Write all that is missing of a batch, and give its shards their names, which are not durable yet.

        Returns:
            As `ShardWriter.finish`, in the order of numbers.
        """
        headers = [shard.finish() for shard in batch.shards]
        headers += self._threads.finish(batch.side_by_side)
        return sorted(headers, key=lambda header: header[0].number)

    def finished(self) -> None:
        """The batch that was taken is committed."""
        self._finishing = Batch()

    def close(self) -> None:
        """Throw away what is not committed, when no thread writes any more."""
        self._threads.close()
        unfinished: Sequence[Batch] = (self._batch, self._finishing)
        self._batch = self._finishing = Batch()
        with ExitStack() as stack:
            for batch in unfinished:
                stack.callback(batch.discard)

    def _new(self) -> ShardWriter:
        self._next_number += 1
        options = self._options
        return ShardWriter(self._path, self._next_number - 1, self._manifest, options)
