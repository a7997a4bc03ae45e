"""One run: read, admit, capture, commit. One event loop, one reader thread, one store thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from hsdump.engines.base import CapturedSample, CaptureFailed, CaptureRequest, Engine
from hsdump.errors import HsdumpError, InputError
from hsdump.extract.budget import ByteBudget
from hsdump.extract.plan import ExtractOptions, ExtractPlan, count_rows
from hsdump.extract.state import RunState
from hsdump.prompts import Skip, read_samples
from hsdump.samples import TokenSample
from hsdump.spool.entry import entry_bytes
from hsdump.store import StoreWriter

T = TypeVar("T")

READ_AHEAD = 64
"""Samples tokenized at a time in the reader thread."""

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0

SPOOL_SHARE = 0.9
"""Of the server's limit, the part that this client uses, so that its own estimate is never refused."""

EMBEDDED_BUDGET = 4 << 30
"""Bytes in flight when there is no spool."""


class Driver:
    """Runs samples through an engine into a store."""

    def __init__(
        self, engine: Engine, plan: ExtractPlan, options: ExtractOptions, open_store: Callable[[], StoreWriter]
    ) -> None:
        """Args:
        open_store: called once, in the thread that will do all of the store's work.
        """
        self._engine, self._plan, self._options, self._open_store = engine, plan, options, open_store
        self._writer: StoreWriter
        self._failed_before: frozenset[str] = frozenset()
        self.state = RunState(rows_expected=count_rows(options.inputs), engine=plan.info)
        spool_limit = plan.info.spool_max_bytes
        self._budget = ByteBudget(int(spool_limit * SPOOL_SHARE) if spool_limit else EMBEDDED_BUDGET)
        self._slots = asyncio.Semaphore(options.concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._unforeseen: BaseException | None = None
        self._store_thread = ThreadPoolExecutor(1, "hsdump-store")
        self._reader_thread = ThreadPoolExecutor(1, "hsdump-reader")
        self._uncommitted: dict[str, int] = {}
        self._last_commit_s = time.monotonic()

    def stop(self, reason: str) -> None:
        """Admit nothing more; what is in flight is finished and committed."""
        if not self._stop.is_set():
            self.state.stopped = reason
            self._stop.set()

    async def run(self) -> RunState:
        """Go through the whole input, or as far as it gets; `state.stopped` and `state.error` say how it ended.

        Raises:
            HsdumpError: the store cannot be opened; nothing was sent.
        """
        try:
            self._writer = await self._in_store(self._open_store)
            await self._run_to_end()
        finally:
            self._store_thread.shutdown()
            self._reader_thread.shutdown(cancel_futures=True)
        if self._unforeseen is not None:
            raise self._unforeseen
        return self.state

    async def _run_to_end(self) -> None:
        self._failed_before = frozenset(await self._in_store(self._writer.failures))
        timer = asyncio.create_task(self._commit_by_time())
        try:
            await self._admit_all()
            if self._tasks:
                await asyncio.wait(self._tasks)
        except InputError as error:
            self._end_early(self._plan.renderer_problem or error)
        except HsdumpError as error:
            self._end_early(error)
        finally:
            for task in (*self._tasks, timer):
                task.cancel()
            await asyncio.gather(*self._tasks, timer, return_exceptions=True)
            try:
                await self._in_store(self._commit)
                await self._in_store(self._writer.close)
            except HsdumpError as error:
                self._end_early(error)

    async def _commit_by_time(self) -> None:
        """Commit what waits although nothing new arrives, as while a server is away."""
        try:
            while True:
                await asyncio.sleep(self._options.commit_s)
                if self._uncommitted and time.monotonic() - self._last_commit_s > self._options.commit_s:
                    await self._in_store(self._commit)
        except HsdumpError as error:
            self._end_early(error)

    def _end_early(self, error: HsdumpError) -> None:
        """The engine, the store or the input is gone: nothing else will succeed either."""
        self.state.error = self.state.error or error
        self.stop(error.what)

    async def _admit_all(self) -> None:
        plan, loop = self._plan, asyncio.get_running_loop()
        rows = read_samples(self._options.inputs, plan.renderer, plan.prompt_options)
        while not self._stop.is_set():
            batch = await loop.run_in_executor(self._reader_thread, _take, rows, READ_AHEAD)
            if not batch:
                self.state.input_done = True
                return
            for row in batch:
                if self._stop.is_set():
                    return
                if isinstance(row, Skip):
                    self.state.skipped[row.reason] += 1
                    self.state.lost_rows += row.lost
                    await self._in_store(self._writer.record_skip, row.source, row.reason, row.detail)
                else:
                    await self._admit(row)

    async def _admit(self, sample: TokenSample) -> None:
        """Start one sample as soon as a slot and room in the spool are free."""
        self.state.read += 1
        if self._writer.is_committed(sample.key) or sample.key in self._uncommitted:
            self.state.already += 1
            return
        if sample.key in self._failed_before and not self._options.retry_failed:
            self.state.earlier_failures += 1
            return
        num_bytes = entry_bytes(self._plan.info.shape, len(sample.input_ids))
        if num_bytes > self._budget.limit:
            detail = (
                f"{num_bytes} bytes, the spool takes {self._budget.limit} at once; raise hsdump serve --spool-bytes"
            )
            await self._fail(sample, "larger-than-spool", detail, attempts=0)
            return
        await self._slots.acquire()
        await self._budget.acquire(num_bytes)
        task = asyncio.create_task(self._capture_one(sample, num_bytes))
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        """Keep what nobody foresaw: it ends the run with its own trace instead of being lost with the task."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._unforeseen = self._unforeseen or error
            self.stop(f"{type(error).__name__}: {error}")

    async def _capture_one(self, sample: TokenSample, num_bytes: int) -> None:
        self.state.in_flight += 1
        self.state.in_flight_bytes += num_bytes
        try:
            await self._try_until_done(sample)
        except HsdumpError as error:
            self._end_early(error)
        finally:
            self.state.in_flight -= 1
            self.state.in_flight_bytes -= num_bytes
            await self._budget.release(num_bytes)
            self._slots.release()

    async def _try_until_done(self, sample: TokenSample) -> None:
        pause_s = FIRST_PAUSE_S
        for attempt in range(self._options.attempts):
            request = CaptureRequest(key=sample.key, input_ids=sample.input_ids, attempt=attempt)
            try:
                captured = await self._engine.capture(request)
            except CaptureFailed as failure:
                if not failure.transient or attempt + 1 == self._options.attempts:
                    await self._fail(sample, failure.reason, failure.detail, attempts=attempt + 1)
                    return
                if self._stop.is_set():
                    return  # stays to do for the next run
                self.state.retries += 1
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            self.state.captured += 1
            await self._in_store(self._keep, sample, captured, attempt + 1)
            return

    async def _fail(self, sample: TokenSample, reason: str, detail: str, *, attempts: int) -> None:
        await self._in_store(lambda: self._writer.record_failure(sample, reason, detail, attempts=attempts))
        self.state.failed[reason] += 1

    def _keep(self, sample: TokenSample, captured: CapturedSample, attempts: int) -> None:
        """Runs in the store thread: take the bytes over, give the spool's memory back, commit now and then."""
        try:
            states = [captured.states[index] for index in self._plan.columns]
            added = self._writer.add(sample, states, attempts=attempts)
        finally:
            captured.release()
        if added:
            self._uncommitted[sample.key] = len(sample.input_ids)
        else:
            self.state.already += 1  # an equal row was in flight at the same time
        due = time.monotonic() - self._last_commit_s > self._options.commit_s
        if due or self._writer.is_full:
            self._commit()

    def _commit(self) -> None:
        """Runs in the store thread."""
        for key in self._writer.commit():
            num_tokens = self._uncommitted.pop(key)
            self.state.committed += 1
            self.state.tokens += num_tokens
            self.state.state_bytes += num_tokens * self._plan.shape.bytes_per_token
        self._last_commit_s = time.monotonic()

    async def _in_store(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._store_thread, function, *args)


def _take(rows: Iterator[TokenSample | Skip], count: int) -> list[TokenSample | Skip]:
    return list(islice(rows, count))
