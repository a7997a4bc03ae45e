"""One run: read, admit, capture, commit. One event loop, one reader thread, the store's threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice

from hsdump.engines.base import CapturedSample, CaptureFailed, CaptureRequest, ServerAway
from hsdump.errors import HsdumpError, InputError
from hsdump.extract.disk import DiskGuard
from hsdump.extract.events import Events
from hsdump.extract.finite import first_non_finite
from hsdump.extract.keeper import Keeper, request_ids
from hsdump.extract.lanes import Cost, Fleet, Lane
from hsdump.extract.ledger import Ledger
from hsdump.extract.only import Only
from hsdump.extract.plan import ExtractOptions, ExtractPlan
from hsdump.extract.state import RunState
from hsdump.prompts import Skip
from hsdump.samples import TokenSample
from hsdump.spool.entry import entry_bytes

READ_AHEAD = 64
"""Samples tokenized at a time in the reader thread."""

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
TICK_S = 1.0
SPOOL_FULL = "spool-full"

MOST_WAITING = 256
"""Captured samples that may wait for the store, however small: each has a task and, in a spool of files, a
descriptor."""

SUSPECT_AFTER = 5
"""Server deaths under a sample after which it is sent alone: one sample that kills servers must not take the others'
time for ever, and only a death while nothing else was there convicts it."""

ALONE_DEATHS = 3

NOT_THE_SAMPLES_FAULT = frozenset({"server-error", "timeout", "connection-lost", "bad-response", "no-entry"})
"""Reasons that count towards a server's illness."""

Rows = Iterator[TokenSample | Skip]


@dataclass(slots=True)
class _Job:
    """One sample on its way."""

    sample: TokenSample
    cost: Cost
    sends: int = 0
    tries: int = 0
    """Sends that count: those whose server did not die."""

    deaths: int = 0
    deaths_alone: int = 0
    pause_s: float = FIRST_PAUSE_S
    has_slot: bool = True


class Driver:
    """Runs samples through servers into a store."""

    def __init__(
        self,
        fleet: Fleet,
        plan: ExtractPlan,
        options: ExtractOptions,
        keeper: Keeper | Ledger,
        state: RunState,
        events: Events,
    ) -> None:
        self._fleet, self._plan, self._options = fleet, plan, options
        self._keeper, self.state, self._events = keeper, state, events
        state.engine = plan.info
        state.lanes = [lane.state for lane in fleet.lanes]
        at_once = fleet.limits.concurrency * len(fleet.lanes)
        self._slots = asyncio.Semaphore(at_once)
        """Until a sample takes no memory of this process any more except that of its tokens."""

        self._places = asyncio.Semaphore(at_once + MOST_WAITING)
        """Until it is in the store."""

        self._kept_at_once = asyncio.Semaphore(at_once)
        """Samples on their way into the store, which may take memory of this process there."""

        writes_here = isinstance(keeper, Keeper)
        self._disk = DiskGuard(options.out, options.disk_reserve) if writes_here else None
        self._only = Only(options.only)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._unforeseen: BaseException | None = None
        self._reader_thread = ThreadPoolExecutor(1, "hsdump-reader")

    def stop(self, reason: str) -> None:
        """Admit nothing more; what is in flight is finished and committed."""
        if not self._stop.is_set():
            self.state.stopped = reason
            self._stop.set()
            self._fleet.stop()
            self._events("stopped", reason=reason)

    async def run(self, open_rows: Callable[[], Rows | AsyncIterator[TokenSample | Skip]]) -> RunState:
        """Go through the whole input, or as far as it gets; `state.stopped` and `state.error` say how it ended.

        Args:
            open_rows: called when the store is open. An iterator is read in a thread of its own.

        Raises:
            HsdumpError: the store cannot be opened; nothing was sent.
        """
        try:
            leftovers = await self._keeper.open()
            await self._run_to_end(open_rows, request_ids(leftovers))
        finally:
            self._keeper.shut_down()
            self._reader_thread.shutdown(cancel_futures=True)
        if self._unforeseen is not None:
            raise self._unforeseen
        return self.state

    async def _run_to_end(
        self, open_rows: Callable[[], Rows | AsyncIterator[TokenSample | Skip]], dead_requests: Sequence[str]
    ) -> None:
        await self._fleet.abort(dead_requests)
        self.state.aborted = len(dead_requests)
        self._fleet.start()
        timer = asyncio.create_task(self._tick())
        try:
            try:
                rows = open_rows()
                await self._admit_all(rows if isinstance(rows, AsyncIterator) else self._ahead(rows))
            except InputError as error:
                self._end_early(self._plan.renderer_problem or error)
            except HsdumpError as error:
                self._end_early(error)
            if self._tasks:  # what is answered and only waits for the store has its room there
                await asyncio.wait(self._tasks)
        finally:
            for task in (*self._tasks, timer):
                task.cancel()
            await asyncio.gather(*self._tasks, timer, return_exceptions=True)
            try:
                await self._keeper.close()
            except HsdumpError as error:
                self._end_early(error)
            self._events("ended", exit_code=self.state.exit_code(), stopped=self.state.stopped)

    async def _tick(self) -> None:
        try:
            while True:
                await asyncio.sleep(min(TICK_S, self._options.commit_s))
                self.state.disk_free = self._disk.free() if self._disk else None
                await self._keeper.tick()
        except HsdumpError as error:
            self._end_early(error)

    def _end_early(self, error: HsdumpError) -> None:
        """The servers, the store, the disk or the input are gone: nothing else will succeed either."""
        self.state.error = self.state.error or error
        self.stop(error.what)

    async def _ahead(self, rows: Rows) -> AsyncIterator[TokenSample | Skip]:
        """Give rows while the next ones are read and tokenized."""
        read = partial(asyncio.get_running_loop().run_in_executor, self._reader_thread, _take, rows, READ_AHEAD)
        coming = read()
        try:
            while batch := await coming:
                coming = read()
                for row in batch:
                    yield row
        finally:
            coming.add_done_callback(lambda late: late.cancelled() or late.exception())  # of an input nobody wants now
            coming.cancel()

    async def _admit_all(self, rows: AsyncIterator[TokenSample | Skip]) -> None:
        async for row in rows:
            if self._stop.is_set():
                return
            if isinstance(row, Skip):
                await self._keeper.skip(row)
            else:
                await self._admit(row)
        self.state.input_done = not self._stop.is_set()
        self.state.unknown_ids = self._only.not_found()

    async def _admit(self, sample: TokenSample) -> None:
        """Start one sample as soon as a slot is free and the disk has room for it."""
        self.state.read += 1
        if not self._only.wants(sample):
            self.state.not_asked += 1
            return
        if self._keeper.committed(sample.key):
            self.state.already += 1
            return
        if self._keeper.failed_before(sample.key) and not self._options.retry_failed:
            self.state.earlier_failures += 1
            return
        num_bytes = entry_bytes(self._plan.info.shape, len(sample.input_ids))
        if num_bytes > self._fleet.largest:
            detail = (
                f"{num_bytes} bytes, the spool takes {self._fleet.largest} at once; raise hsdump serve --spool-bytes"
            )
            await self._keeper.fail(sample, "larger-than-spool", detail, attempts=0)
            return
        self._keeper.note(sample, "pending")
        await self._places.acquire()
        await self._slots.acquire()
        if self._disk is not None:
            self._disk.check(len(sample.input_ids) * self._plan.shape.bytes_per_token, self.state)
        job = _Job(sample, Cost(len(sample.input_ids), num_bytes))
        task = asyncio.create_task(self._work(job))
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        """Keep what nobody foresaw: it ends the run with its own trace instead of being lost with the task."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._unforeseen = self._unforeseen or error
            self.stop(f"{type(error).__name__}: {error}")

    async def _work(self, job: _Job) -> None:
        num_bytes = job.cost.num_tokens * self._plan.shape.bytes_per_token
        self.state.in_flight_bytes += num_bytes
        try:
            while await self._try(job):
                if self._stop.is_set():
                    break
            else:
                return
            self._keeper.unnote(job.sample)  # it stays to do for the next run
        except HsdumpError as error:
            self._keeper.unnote(job.sample)
            self._end_early(error)
        except asyncio.CancelledError:
            self._keeper.unnote(job.sample)
            raise
        finally:
            self.state.in_flight_bytes -= num_bytes
            self._free_slot(job)
            self._places.release()

    async def _try(self, job: _Job) -> bool:
        """Send a sample once. True when it has to be sent again."""
        alone = job.deaths >= SUSPECT_AFTER
        lane = await self._fleet.take(job.cost, alone=alone)
        if lane is None:
            return True
        try:
            await self._send(lane, job)
        except ServerAway as away:
            self._fleet.failed(lane, away.detail, ill=False)
            failure: CaptureFailed = away
        except CaptureFailed as other:
            self._fleet.failed(lane, str(other), ill=other.reason in NOT_THE_SAMPLES_FAULT)
            failure = other
        else:
            return False
        if isinstance(failure, ServerAway):
            return await self._server_died(job, failure, alone=alone)
        crowded = failure.reason == SPOOL_FULL and lane.has_waiting
        return await self._failed(job, failure, counts=not crowded)

    async def _send(self, lane: Lane, job: _Job) -> None:
        """Send a sample and bring its states to the store. The lane's memory is held until its spool has it back."""
        sample = job.sample
        request = CaptureRequest(key=sample.key, input_ids=sample.input_ids, attempt=job.sends, sample=sample)
        self._keeper.note(job.sample, "sent", lane.engine.request_id(request), lane.state.name)
        self.state.in_flight += 1
        self.state.in_flight_tokens += job.cost.num_tokens
        job.sends += 1
        started_s = time.monotonic()
        try:
            captured = await lane.engine.capture(request)
        except BaseException:
            self._answered(lane, job, time.monotonic() - started_s, well=False)
            raise
        self._answered(lane, job, time.monotonic() - started_s, well=True)
        self.state.waiting += 1
        try:
            self._keeper.note(sample, "captured", server=lane.state.name)
            await self._keep(lane, job, captured)
        finally:
            self.state.waiting -= 1
            self._fleet.give_back(lane, job.cost)

    def _answered(self, lane: Lane, job: _Job, seconds: float, *, well: bool) -> None:
        self.state.in_flight -= 1
        self.state.in_flight_tokens -= job.cost.num_tokens
        self._fleet.answered(lane, job.cost, seconds, well=well)

    def _free_slot(self, job: _Job) -> None:
        if job.has_slot:
            job.has_slot = False
            self._slots.release()

    async def _keep(self, lane: Lane, job: _Job, captured: CapturedSample) -> None:
        """Raises:
        CaptureFailed: the states are not numbers.
        """
        if captured.in_spool:
            self._free_slot(job)
        with ExitStack() as unless_kept:
            unless_kept.callback(captured.release)
            async with self._kept_at_once:
                await self._check(captured)
                self._fleet.succeeded(lane, job.cost)
                self.state.captured += 1
                unless_kept.pop_all()  # the keeper gives it back
                await self._keeper.keep(job.sample, captured, job.tries + 1)

    async def _check(self, captured: CapturedSample) -> None:
        shape, wrong = self._plan.info.shape, None
        if captured.states:  # a collector keeps them where they are
            wrong = await asyncio.to_thread(first_non_finite, shape.names, captured.states, shape.dtype)
        if wrong is not None:
            raise CaptureFailed("not-finite", f"{wrong} is NaN or infinite", transient=False)

    async def _server_died(self, job: _Job, away: ServerAway, *, alone: bool) -> bool:
        self.state.server_deaths += 1
        job.deaths += 1
        job.deaths_alone += alone
        if job.deaths_alone < ALONE_DEATHS:
            return True
        detail = f"{job.deaths} servers died with it, {job.deaths_alone} of them with nothing else to do: {away.detail}"
        await self._keeper.fail(job.sample, "server-died", detail, attempts=job.sends)
        self._check_failures()
        return False

    async def _failed(self, job: _Job, failure: CaptureFailed, *, counts: bool) -> bool:
        """Args:
        counts: as a try; not where other samples of this run were in the way.
        """
        job.tries += counts
        if not failure.transient or job.tries >= self._options.attempts:
            await self._keeper.fail(job.sample, failure.reason, failure.detail, attempts=job.tries)
            self._check_failures()
            return False
        self.state.retries += 1
        self._events("retried", key=job.sample.key, reason=failure.reason, detail=failure.detail, attempt=job.tries)
        await self._pause(job.pause_s)
        job.pause_s = min(2 * job.pause_s, LONGEST_PAUSE_S)
        return True

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not longer than the run goes on."""
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait([stopped], timeout=seconds)
        stopped.cancel()

    def _check_failures(self) -> None:
        """Raises:
        InputError: too many failures for this to be single samples' fault.
        """
        failed = self.state.failed.total()
        if failed > self._options.max_failed:
            worst, count = self.state.failed.most_common(1)[0]
            raise InputError(
                f"{failed} samples failed, more than --max-failed {self._options.max_failed}; {count} of them: {worst}",
                "see hsdump store ls --failed, mend the cause, and run again with --retry-failed",
            )


def _take(rows: Rows, count: int) -> list[TokenSample | Skip]:
    return list(islice(rows, count))
