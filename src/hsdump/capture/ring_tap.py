"""The tap for accelerators: rows to a registered ring in shared memory, while the next pass already runs.

What one pass costs the scheduler: clones on the forward stream into memory of ours (a CUDA graph's next replay
overwrites the tensors that the tap sees), one copy a clone queued on a side stream, some events. A thread waits for the
events and publishes; it holds no lock and touches no row.

Letters: T = rows of the batch, H = hidden size.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from hsdump.capture.batch import BatchStates, Segment
from hsdump.capture.staging import Block, Piece, rounds_of, rows_beyond
from hsdump.spool.ring import RegionLayout, RingSegment, RingWriter
from hsdump.spool.writer import SpoolWriter

logger = logging.getLogger(__name__)


class RingTap:
    """Copies hsdump's rows of successive batches into a ring. One a scheduler process, used by one thread."""

    def __init__(
        self, ring: RingWriter, notes: SpoolWriter, *, device: str, staging: int = 0, share: tuple[int, int] = (0, 1)
    ) -> None:
        """Register the ring's memory with the device, so that copies into it are asynchronous and fast.

        Args:
            notes: where requests are told that they were refused.
            device: the model's.
            staging: bytes of the device's memory that rows pass through.
            share: (rank, ranks): of each segment's rows this rank copies its share, since tensor-parallel ranks hold
                the same states.
        """
        self._ring, self._notes, self._share = ring, notes, share
        self._memory = torch.frombuffer(ring.map, dtype=torch.uint8)
        self._copier = _CudaCopier(self._memory, ring, staging) if device.startswith("cuda") else _HostCopier(ring)

    def take(self, segments: Sequence[Segment], states: BatchStates) -> None:
        """Queue the copies of one pass; never waits. `settle` has to be called before the next pass of any kind."""
        start_ns = time.monotonic_ns()
        mine = [part for segment in segments if (part := _share_of(segment, *self._share)).num_rows]
        if mine:
            self._take(mine, states)
        control = self._ring.control
        control.add("batches", 1)
        control.add("rows", sum(segment.num_rows for segment in mine))
        control.add("busy_ns", time.monotonic_ns() - start_ns)

    def settle(self) -> None:
        """Have the device begin nothing more until rows that are copied from where the last pass left them are out."""
        self._copier.settle()

    def refuse(self, segments: Sequence[Segment], reason: str, detail: str) -> None:
        """Fail requests whose rows could not be taken."""
        for segment in segments:
            self._notes.fail(segment.rid, reason, detail)

    def _take(self, segments: list[Segment], states: BatchStates) -> None:
        shape = self._ring.shape
        needed = max(segment.first_row + segment.num_rows for segment in segments)
        columns = states.columns(len(shape.layers), shape.hidden_size, needed)
        packed, row = [], 0
        for segment in segments:
            packed.append(RingSegment(str(segment.rid), row, segment.position, segment.num_rows))
            row += segment.num_rows
        place = self._ring.reserve(packed)
        if place is None:
            detail = f"{self._ring.used_bytes} of {self._ring.data_bytes} bytes of the ring wait for the client"
            self.refuse(segments, "spool-full", detail)
            return
        offset, layout, end = place
        try:
            sources = [states.token_ids.to(torch.int64), *columns]
            targets = [self._target(offset, layout, index, source) for index, source in enumerate(sources)]
            self._copier.copy(_runs(segments), list(zip(sources, targets, strict=True)), end)
        except BaseException:
            self._ring.cancel(offset, layout)  # what was not copied must never look like rows
            self._copier.pass_over(end)
            raise

    def _target(self, offset: int, layout: RegionLayout, index: int, source: torch.Tensor) -> torch.Tensor:
        """View the place of one block in the ring as [T'] or [T', H] of the source's dtype."""
        start = offset + (layout.token_ids_offset if index == 0 else layout.state_offset(index - 1))
        num_bytes = 8 * layout.num_rows if index == 0 else layout.state_bytes
        return self._memory[start : start + num_bytes].view(source.dtype).view(layout.num_rows, *source.shape[1:])


Copies = list[tuple[torch.Tensor, torch.Tensor]]
Runs = list[tuple[int, int, int]]


class _HostCopier:
    """The model runs on the CPU: a copy is done when it returns."""

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring

    def copy(self, runs: Runs, copies: Copies, end: int) -> None:
        for source, target in copies:
            for first, to, rows in runs:
                target[to : to + rows].copy_(source[first : first + rows])
        self._ring.publish(end)

    def pass_over(self, end: int) -> None:
        self._ring.publish(end)

    def settle(self) -> None:
        """Nothing is under way when `copy` returns."""


class _CudaCopier:
    """Asynchronous copies on one side stream; a thread publishes each region when its event has passed.

    A pass's rows are cloned into memory of ours. What does not fit there is copied from where it is, and the device
    begins the next pass after that (1.6 ms after this one's last layer for 90 MB; some of it passes beside the head's
    work). Only the device ever waits, never the scheduler.
    """

    def __init__(self, memory: torch.Tensor, ring: RingWriter, staging: int) -> None:
        result = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(result) != 0:
            raise RuntimeError(f"cudaHostRegister of {memory.numel()} bytes failed with {result}")
        self._ring = ring
        self._stream: Any = torch.cuda.Stream()
        self._staging = torch.empty(staging, dtype=torch.uint8, device="cuda")
        self._busy: Any = None
        """Passes when nothing in `_staging` is waited for any more."""

        self._owed: Any = None
        """Passes when the rows that were copied from where they are have been read."""

        self._waiting: queue.SimpleQueue[tuple[Any, int, int]] = queue.SimpleQueue()
        self.delay_cycles = int(os.environ.get("HSDUMP_TEST_DELAY_CYCLES", "0"))
        """For the test that provokes a late copy: the side stream sleeps so long before each."""

        threading.Thread(target=self._publish, args=(torch.cuda.current_device(),), daemon=True).start()

    def copy(self, runs: Runs, copies: Copies, end: int) -> None:
        forward: Any = torch.cuda.current_stream()
        if self.delay_cycles:
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(self.delay_cycles)
        blocks = [Block(len(target), target[0].numel() * target.element_size()) for _, target in copies]
        capacity = self._staging.numel()
        beyond = rows_beyond(blocks, capacity) if len(runs) == 1 else 0
        if beyond:
            source, target = copies[-1]
            (rows,) = _rows_of(source, runs, 0, beyond)
            self._copy_in_place(forward, rows, target[:beyond])
        for pieces in rounds_of(blocks, capacity, beyond):
            self._copy_clones(forward, pieces, runs, copies)
        self.pass_over(end)

    def settle(self) -> None:
        owed, self._owed = self._owed, None
        if owed is not None:
            torch.cuda.current_stream().wait_event(owed)

    def _copy_in_place(self, forward: Any, rows: torch.Tensor, target: torch.Tensor) -> None:
        ready: Any = torch.cuda.Event()
        ready.record(forward)
        self._owed = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            target.copy_(rows, non_blocking=True)
            rows.record_stream(self._stream)  # its memory is not given to anybody else before
            self._owed.record(self._stream)

    def _copy_clones(self, forward: Any, pieces: list[Piece], runs: Runs, copies: Copies) -> None:
        """Clone rows on the forward stream, copy the clones on the side stream.

        Without the clones, a copy that is late reads the next batch (measured: relative error 0.5 to 1.3, silently).
        """
        if self._busy is not None:
            forward.wait_event(self._busy)
        clones = []
        for piece in pieces:
            source, target = copies[piece.block]
            rows = target[piece.first : piece.last]
            num_bytes = rows.numel() * rows.element_size()
            clone = self._staging[piece.offset : piece.offset + num_bytes].view(rows.dtype).view(rows.shape)
            parts = _rows_of(source, runs, piece.first, piece.last)
            if len(parts) == 1:
                clone.copy_(parts[0])
            else:
                torch.cat(parts, out=clone)
            clones.append((clone, rows))
        ready: Any = torch.cuda.Event()
        ready.record(forward)
        self._busy = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            for clone, rows in clones:
                rows.copy_(clone, non_blocking=True)
            self._busy.record(self._stream)

    def pass_over(self, end: int) -> None:
        done: Any = torch.cuda.Event(blocking=True)
        done.record(self._stream)
        self._waiting.put((done, end, time.monotonic_ns()))

    def _publish(self, device: int) -> None:
        torch.cuda.set_device(device)
        while True:
            done, end, queued_ns = self._waiting.get()
            try:
                done.synchronize()
                self._ring.publish(end)
                self._ring.control.add("late_ns", time.monotonic_ns() - queued_ns)
            except Exception:  # a process border: the client's requests time out, the server goes on
                logger.exception("hsdump could not publish a batch")


def _share_of(segment: Segment, rank: int, ranks: int) -> Segment:
    """Cut a segment into equal parts by rows and give this rank's."""
    first = segment.num_rows * rank // ranks
    last = segment.num_rows * (rank + 1) // ranks
    return Segment(segment.rid, segment.first_row + first, segment.position + first, last - first)


def _runs(segments: Sequence[Segment]) -> Runs:
    """Merge segments that follow each other in the batch: (first row there, first row in the region, rows)."""
    runs: Runs = []
    to = 0
    for segment in segments:
        if runs and runs[-1][0] + runs[-1][2] == segment.first_row:
            first, start, rows = runs[-1]
            runs[-1] = (first, start, rows + segment.num_rows)
        else:
            runs.append((segment.first_row, to, segment.num_rows))
        to += segment.num_rows
    return runs


def _rows_of(source: torch.Tensor, runs: Runs, begin: int, end: int) -> list[torch.Tensor]:
    """Give rows begin..end-1 of a region, as views of the batch's tensor."""
    parts = []
    for first, to, rows in runs:
        low, high = max(begin, to), min(end, to + rows)
        if low < high:
            parts.append(source[first + low - to : first + high - to])
    return parts
