"""All of a run's work on its store: one thread takes states over and commits, another notes where every sample is."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from hsdump.engines.base import CapturedSample
from hsdump.extract.events import Events
from hsdump.extract.plan import ExtractOptions, ExtractPlan
from hsdump.extract.state import FailedSample, RunState
from hsdump.keys import KeySet
from hsdump.prompts import Skip
from hsdump.samples import TokenSample
from hsdump.store import StoreWriter
from hsdump.store.encoding import EncodedSample
from hsdump.store.index import RequestRow, utc_now

T = TypeVar("T")

NOTE_THREAD = "hsdump-notes"
ROOM_S = 0.02
MOST_IN_A_COMMIT = 4096
"""Samples, however small: each takes some 10 KB of memory until its commit is done, and two commits may be open."""


class Keeper:
    """The run's end of its store. Use from one event loop; everything slow happens in threads."""

    def __init__(
        self,
        open_store: Callable[[], StoreWriter],
        plan: ExtractPlan,
        options: ExtractOptions,
        state: RunState,
        events: Events,
    ) -> None:
        """Args:
        open_store: called once, in the thread that will add and commit.
        """
        self._open_store, self._plan, self._options = open_store, plan, options
        self._state, self._events = state, events
        self._writer: StoreWriter
        self._thread = ThreadPoolExecutor(1, "hsdump-store")
        self._note_thread = ThreadPoolExecutor(1, NOTE_THREAD)
        """For what waits for the index: a fsync takes up to a second while the disk has shards to write, and samples
        are handed over meanwhile."""

        self._failed_before: frozenset[str] = frozenset()
        self._uncommitted: dict[str, int] = {}
        self._added = 0
        """Since the last commit was begun."""

        self._commits: deque[Future[list[str]]] = deque()
        """Under way or not counted yet, oldest first. The store thread's."""

        self._newest: Future[list[str]] | None = None
        self._last_commit_s = time.monotonic()
        self._notes: dict[str, RequestRow] = {}
        self._gone: set[str] = set()

    async def open(self) -> list[RequestRow]:
        """Open the store.

        Returns:
            What a run that died had on its way.

        Raises:
            StoreError: the store cannot be opened.
        """
        self._writer = await self._do(self._open_store)
        self._failed_before = frozenset(await self._do(self._writer.failures))
        leftovers = await self._do(self._take_leftovers)
        self._state.is_open = True  # last: a collector's driver is told at once what is there and what failed
        return leftovers

    def committed(self, key: str) -> bool:
        """Tell whether a sample is in the store, or will be with the next commit."""
        return self._writer.is_committed(key) or key in self._uncommitted

    def failed_before(self, key: str) -> bool:
        return key in self._failed_before

    def is_safe(self, key: str) -> bool:
        """Tell whether a sample is committed; one that waits for its commit is not."""
        return self._writer.is_committed(key)

    def failed_keys(self) -> frozenset[str]:
        return self._failed_before

    def committed_keys(self) -> KeySet:
        return self._writer.committed

    def note(self, sample: TokenSample, state: str, request_id: str = "", server: str = "") -> None:
        """Note where a sample is; written down within a second or with the next commit."""
        self._gone.discard(sample.key)
        self._notes[sample.key] = RequestRow(
            key=sample.key,
            source=sample.source,
            num_tokens=len(sample.input_ids),
            state=state,
            request_id=request_id,
            server=server,
            at=utc_now(),
        )

    def unnote(self, sample: TokenSample) -> None:
        """Forget a sample that goes back to the input, for the next run."""
        self._notes.pop(sample.key, None)
        self._gone.add(sample.key)

    async def keep(self, sample: TokenSample, captured: CapturedSample, attempts: int) -> None:
        """Take the bytes over, give the spool's memory back, commit now and then.

        Raises:
            StoreError: the disk failed.
        """
        states = [captured.states[index] for index in self._plan.columns]
        try:
            # Beside the store thread, which only writes: at full speed both have enough to do.
            encoded = await asyncio.to_thread(self._writer.encode, sample, states, attempts=attempts)
            await self._room()
        except BaseException:
            captured.release()
            raise
        begun = self._thread.submit(self._keep, encoded, captured.release)
        begun.add_done_callback(lambda begun: captured.release() if begun.cancelled() else None)
        written: Future[bool] = await asyncio.wrap_future(begun)
        await asyncio.wrap_future(written)

    async def fail(self, sample: TokenSample, reason: str, detail: str, *, attempts: int) -> None:
        """Note durably that a sample has no states."""
        self._notes.pop(sample.key, None)  # first: a note written after the failure would be of a sample that is done
        await self._do(
            lambda: self._writer.record_failure(sample, reason, detail, attempts=attempts), self._note_thread
        )
        self._state.add_failure(FailedSample(key=sample.key, source=sample.source, reason=reason, detail=detail))
        self._events("failed", key=sample.key, source=sample.source, reason=reason, detail=detail, attempts=attempts)

    async def skip(self, row: Skip) -> None:
        self._state.skipped[row.reason] += 1
        self._state.lost_rows += row.lost
        self._events("skipped", source=row.source, reason=row.reason, detail=row.detail)
        await self._do(lambda: self._writer.record_skip(row.source, row.reason, row.detail))

    async def tick(self) -> None:
        """Commit what waits although nothing new arrives, as while a server is away; write the notes down.

        Raises:
            StoreError: the disk failed.
        """
        await self._do(self._tick)
        await self._do(self._write_notes, self._note_thread)

    async def close(self) -> None:
        """Commit and let go of the store.

        Raises:
            StoreError: the disk failed; what was committed before is safe.
        """
        try:
            await self._do(self._finish)
            await self._do(self._forget_notes, self._note_thread)
        finally:
            await asyncio.to_thread(self._note_thread.shutdown)  # it still needs the index
            await self._do(self._writer.close)

    def shut_down(self) -> None:
        self._thread.shutdown()
        self._note_thread.shutdown()

    def _take_leftovers(self) -> list[RequestRow]:
        found = self._writer.index.requests()
        if found:
            with self._writer.index.transaction():
                self._writer.index.clear_requests()
        return found

    def _keep(self, encoded: EncodedSample, release: Callable[[], None]) -> Future[bool]:
        """Gives the writing, which other threads do; this one only says where, and waits while they are behind."""
        is_new = not self._writer.is_known(encoded.record.key)
        # The writer releases, not who awaits it: a cancelled wait must not free what is being written.
        written = self._writer.begin_add(encoded, release)
        if is_new:
            self._uncommitted[encoded.record.key] = encoded.record.num_tokens
            self._added += 1
        else:
            self._state.already += 1  # an equal row was in flight at the same time
        if self._is_due():
            self._begin_commit()
        return written

    async def _room(self) -> None:
        """Wait while there is enough for a commit and the one before is still under way.

        Here and not in the store's thread, which counts commits meanwhile.
        """
        while self._is_full() and self._is_committing():
            await asyncio.sleep(ROOM_S)

    def _is_full(self) -> bool:
        return self._writer.is_full or self._added >= MOST_IN_A_COMMIT

    def _is_committing(self) -> bool:
        newest = self._newest
        return newest is not None and not newest.done()

    def _is_due(self) -> bool:
        late = time.monotonic() - self._last_commit_s > self._options.commit_s
        return (late or self._is_full()) and not self._is_committing()

    def _tick(self) -> None:
        if self._uncommitted and self._is_due():
            self._begin_commit()
        self._collect()

    def _finish(self) -> None:
        keys = self._writer.commit()
        self._collect()
        self._count(keys)

    def _begin_commit(self) -> None:
        """Have the store's second thread make durable what was captured, while the next shard fills."""
        for key in self._uncommitted:
            self._notes.pop(key, None)
        self._newest = self._writer.begin_commit()
        self._commits.append(self._newest)
        self._added = 0
        self._last_commit_s = time.monotonic()
        self._collect()

    def _collect(self) -> None:
        """Count the commits that are done."""
        while self._commits and self._commits[0].done():
            self._count(self._commits.popleft().result())

    def _count(self, keys: list[str]) -> None:
        tokens = 0
        for key in keys:
            tokens += (num_tokens := self._uncommitted.pop(key))
            self._notes.pop(key, None)
            self._state.committed += 1
            self._state.tokens += num_tokens
            self._state.state_bytes += num_tokens * self._plan.shape.bytes_per_token
        if keys:
            self._events("committed", samples=len(keys), tokens=tokens, keys=keys)

    def _write_notes(self) -> None:
        notes, self._notes = self._notes, {}
        gone, self._gone = self._gone, set()
        if notes or gone:
            with self._writer.index.transaction(durable=False):
                self._writer.index.set_requests(notes.values(), gone)

    def _forget_notes(self) -> None:
        """The run is over: what is neither committed nor failed went back to the input, however it was interrupted."""
        self._notes.clear()
        with self._writer.index.transaction():
            self._writer.index.clear_requests()

    async def _do(self, function: Callable[[], T], thread: ThreadPoolExecutor | None = None) -> T:
        return await asyncio.get_running_loop().run_in_executor(thread or self._thread, function)


def request_ids(rows: Iterable[RequestRow]) -> list[str]:
    """Give the requests that a server may still have."""
    return [row.request_id for row in rows if row.state == "sent" and row.request_id]
