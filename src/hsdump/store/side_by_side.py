"""Fills several shards at a time, each in a thread of its own, and makes them durable side by side.

One file takes less than its disk: writes to it are copied one after the other, and its fsync waits alone. A further
file is begun only when those before it are behind: a steady source that is slower than the disk makes no more shards
for it, one that comes in bursts some, and smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import final

from hsdump.store.codecs import Encoded
from hsdump.store.encoding import EncodedSample
from hsdump.store.format import SampleRecord, ShardHeader
from hsdump.store.health import Health
from hsdump.store.shard_writer import ShardWriter

FILL_THREAD = "hsdump-fill"
COMMIT_THREAD = "hsdump-commit"

AHEAD = 2
"""Samples that a thread has at a time: one is written, one waits. More would only keep their memory for longer."""

WORTH_A_SHARD = 8
"""Each shard must hold this part of its size before a further one is begun: samples come in bursts, and a burst alone
is no reason for small shards.
"""

SMALL_BYTES = 1 << 20
"""A smaller sample is written by the thread that brings it where nothing waits: to wake another takes as long."""


@final
class _FillThread:
    """Writes one sample after the other. `busy` is for the thread that gives it work."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, FILL_THREAD)
        self._writing: list[Future[bool]] = []

    @property
    def busy(self) -> int:
        """Samples that are not written yet."""
        return len(self.unwritten())

    def unwritten(self) -> list[Future[bool]]:
        self._writing = [future for future in self._writing if not future.done()]
        return self._writing

    def took(self, future: Future[bool]) -> None:
        self._writing.append(future)


@dataclass(slots=True, eq=False)
class Filling:
    """A shard that a thread fills."""

    shard: ShardWriter
    thread: _FillThread
    last: Future[bool] | None = None
    """The newest sample. Its thread writes in order, so with it all are written."""

    is_closed: bool = False
    """It takes no further sample, whatever its size."""


@final
class SideBySide:
    """The threads of one writer. `add` is for its thread alone; `finish` may run beside it in another."""

    def __init__(self, count: int, shard_bytes: int, open_shard: Callable[[], ShardWriter], health: Health) -> None:
        self._count, self._shard_bytes = max(1, count), shard_bytes
        self._open_shard, self._health = open_shard, health
        self._threads: list[_FillThread] = []
        self._finishers: ThreadPoolExecutor | None = None

    def add(self, fillings: list[Filling], encoded: EncodedSample, release: Callable[[], None]) -> Future[bool]:
        """Give a sample its place, and have its bytes written there.

        Waits while all shards that may take it are behind by as many samples as they may be.

        Args:
            fillings: of the present batch; may get another.
            release: called when the bytes are needed no more, unless this raises.

        Returns:
            Resolves to True when the bytes are written, or to why not. It cannot be cancelled: the shard counts on it.
        """
        filling = self._choose(fillings, encoded.record)
        filling.shard.place(encoded.record)
        future: Future[bool] = Future()
        future.set_running_or_notify_cancel()
        filling.last = future
        small = sum(entry.num_bytes for entry in encoded.record.tensors) < SMALL_BYTES
        if small and not filling.thread.busy:
            self._write(filling.shard, encoded.parts, release, future)
        else:
            filling.thread.took(future)
            filling.thread.pool.submit(self._write, filling.shard, encoded.parts, release, future)
        return future

    def finish(self, fillings: list[Filling]) -> list[tuple[ShardHeader, int]]:
        """Wait until all bytes are written, and do what `ShardWriter.finish` does for all shards side by side.

        On an error too, no shard is under way any more.
        """
        wait([one.last for one in fillings if one.last is not None])  # one that failed keeps all others from a name
        if len(fillings) < 2:
            return [self._finish_one(one) for one in fillings]
        if self._finishers is None:
            self._finishers = ThreadPoolExecutor(self._count, f"{COMMIT_THREAD}-shard")
        futures = [self._finishers.submit(self._finish_one, one) for one in fillings]
        wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        """Wait for the threads. What waits in them is still written, unless the writer has given up."""
        for thread in self._threads:
            thread.pool.shutdown()
        if self._finishers is not None:
            self._finishers.shutdown()

    def _finish_one(self, filling: Filling) -> tuple[ShardHeader, int]:
        if filling.last is not None:
            filling.last.result()
        with self._health.checked():
            return filling.shard.finish()

    def _write(
        self, shard: ShardWriter, parts: list[Encoded], release: Callable[[], None], future: Future[bool]
    ) -> None:
        try:
            try:
                with self._health.checked():
                    shard.write(parts)
            finally:
                release()
        except BaseException as error:  # noqa: BLE001 - it is raised where the sample is waited for
            future.set_exception(error)
        else:
            future.set_result(True)

    def _choose(self, fillings: list[Filling], record: SampleRecord) -> Filling:
        """Give the shard that a sample goes to: the first that is not behind, else a further one, else the one that is
        behind least.
        """
        while True:
            takers = [one for one in fillings if self._takes(one, record)]
            idle = next((one for one in takers if not one.thread.busy), None)
            if idle is not None:
                return idle
            least = min(takers, key=lambda one: one.thread.busy, default=None)
            behind = AHEAD if least is None else least.thread.busy
            if least is None or self._may_begin_another(fillings):
                thread = self._free_thread(takers)
                if thread.busy < behind:  # else it still writes for the commit before
                    fillings.append(Filling(self._open_shard(), thread))
                    return fillings[-1]
            if least is not None and behind < AHEAD:
                return least
            wait([future for thread in self._threads for future in thread.unwritten()], return_when=FIRST_COMPLETED)

    def _takes(self, filling: Filling, record: SampleRecord) -> bool:
        if not filling.is_closed:
            filling.is_closed = filling.shard.data_bytes >= self._shard_bytes or not filling.shard.has_room_for(record)
        return not filling.is_closed

    def _may_begin_another(self, fillings: list[Filling]) -> bool:
        """Not when one is full already: the commit is near, and waits for the smallest."""
        if len(fillings) >= self._count or any(one.is_closed for one in fillings):
            return False
        return all(WORTH_A_SHARD * one.shard.data_bytes >= self._shard_bytes for one in fillings)

    def _free_thread(self, takers: list[Filling]) -> _FillThread:
        """Give the least busy thread of those that fill no shard of this batch; a new one before one that is busy."""
        taken = [one.thread for one in takers]
        free = [thread for thread in self._threads if thread not in taken]
        best = min(free, key=lambda thread: thread.busy, default=None)
        if best is None or (best.busy and len(self._threads) < self._count):
            best = _FillThread()
            self._threads.append(best)
        return best
