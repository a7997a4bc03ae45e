"""The client's end of the rings: regions in, whole samples out, each region's memory back as soon as possible.

A thread follows the rings. Rows of a request may come in any number of regions, in any order, from several ranks, and
twice after a retraction; `(position, rows)` places them. A sample whose rows lie in one region is handed out as views
of shared memory; any other is put together in memory of its own while its rows arrive, states side by side, so that
the last piece is all that is left to copy when the last row is in.

Letters: S = tokens of one sample, T = rows of a region, H = hidden size.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hsdump.arrays import NUMPY_DTYPES, StateArray
from hsdump.engines.rows import Rows
from hsdump.errors import SpoolError
from hsdump.schema import StateShape
from hsdump.spool.names import Rid
from hsdump.spool.ring import Region, RingReader, RingSegment

SHORTEST_PAUSE_S = 0.0002
LONGEST_PAUSE_S = 0.005


@dataclass(slots=True)
class _Waiting:
    """A request whose rows are coming in."""

    num_tokens: int
    future: Future[Rows]
    token_ids: NDArray[np.int64] | None = None
    states: tuple[StateArray, ...] = ()
    spans: list[tuple[int, int]] = field(default_factory=list)
    """First and last-plus-one row of what is in, in order of arrival."""


class RingCollector:
    """Follows the rings of one server. `expect` before sending a request; `forget` when nobody waits any more."""

    def __init__(self, paths: Sequence[Path], shape: StateShape) -> None:
        """Raises:
        SpoolError: a ring cannot be opened.
        """
        self._shape = shape
        try:
            self._readers = [RingReader(path, shape) for path in paths]
        except (OSError, ValueError) as error:
            raise SpoolError(f"the server's ring cannot be read ({error})", "start the server again") from error
        self._waiting: dict[Rid, _Waiting] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.error: Exception | None = None
        self._copiers = ThreadPoolExecutor(len(shape.names), "hsdump-copy")
        self._thread = threading.Thread(target=self._follow, name="hsdump-ring", daemon=True)
        self._thread.start()

    def expect(self, rid: Rid) -> Future[Rows]:
        """Announce a request before it is sent."""
        waiting = _Waiting(rid.num_tokens, Future())
        with self._lock:
            self._waiting[rid] = waiting
        return waiting.future

    def forget(self, rid: Rid) -> None:
        """Drop what came in for a request, and all that still comes."""
        with self._lock:
            self._waiting.pop(rid, None)

    def rows_of(self, rid: Rid) -> int:
        """Count the rows that are in, for an error message."""
        with self._lock:
            waiting = self._waiting.get(rid)
            return _covered(waiting.spans, waiting.num_tokens) if waiting else 0

    def close(self) -> None:
        """Stop following and give all memory back to the server."""
        self._stop.set()
        self._thread.join()
        self._copiers.shutdown()
        if self.error is None:
            for reader in self._readers:
                reader.close()

    @property
    def room(self) -> float:
        """Share of the fullest ring that takes rows for certain."""
        return min(reader.room for reader in self._readers)

    @property
    def num_held(self) -> int:
        """Regions whose rows somebody still reads; they may not be given back yet."""
        return sum(reader.num_held for reader in self._readers)

    def _follow(self) -> None:
        pause_s = SHORTEST_PAUSE_S
        while not self._stop.is_set():
            try:
                found = False
                for reader in self._readers:
                    while region := reader.poll():
                        self._take(reader, region)
                        found = True
            except Exception as error:  # noqa: BLE001 - a thread's border: kept for whoever waits
                self.error = error
                return
            pause_s = SHORTEST_PAUSE_S if found else min(2 * pause_s, LONGEST_PAUSE_S)
            if not found:
                time.sleep(pause_s)

    def _take(self, reader: RingReader, region: Region) -> None:
        """Hand each segment to the request it belongs to; rows nobody waits for are dropped."""
        hold = _Hold(reader, region)
        ids_T, states_TH = self._views(reader, region)
        for segment in region.segments:
            rid = Rid.parse(segment.rid)
            with self._lock:
                waiting = self._waiting.get(rid) if rid else None
            if waiting is None or rid is None or segment.position + segment.num_rows > waiting.num_tokens:
                continue
            rows = slice(segment.first_row, segment.first_row + segment.num_rows)
            if segment.num_rows == waiting.num_tokens:
                found = Rows(ids_T[rows], tuple(state[rows] for state in states_TH), hold.share())
            else:
                self._put(waiting, segment, ids_T, states_TH)
                if _covered(waiting.spans, waiting.num_tokens) < waiting.num_tokens:
                    continue
                assert waiting.token_ids is not None
                found = Rows(waiting.token_ids, waiting.states, _nothing, in_spool=False)
            with self._lock:
                wanted = self._waiting.pop(rid, None)
            if wanted is not None:
                wanted.future.set_result(found)
            else:
                found.release()
        hold.let_go()

    def _put(
        self,
        waiting: _Waiting,
        segment: RingSegment,
        ids_T: NDArray[np.int64],
        states_TH: tuple[StateArray, ...],
    ) -> None:
        """Copy one piece of a sample to its place; a replayed piece is simply written again."""
        if waiting.token_ids is None:
            waiting.token_ids = np.empty(waiting.num_tokens, dtype=np.int64)
            shape = (waiting.num_tokens, self._shape.hidden_size)
            waiting.states = tuple(np.empty(shape, dtype=state.dtype) for state in states_TH)
        to = slice(segment.position, segment.position + segment.num_rows)
        of = slice(segment.first_row, segment.first_row + segment.num_rows)
        waiting.token_ids[to] = ids_T[of]
        list(self._copiers.map(lambda whole, part: np.copyto(whole[to], part[of]), waiting.states, states_TH))
        waiting.spans.append((to.start, to.stop))

    def _views(self, reader: RingReader, region: Region) -> tuple[NDArray[np.int64], tuple[StateArray, ...]]:
        layout, dtype = region.layout, NUMPY_DTYPES[self._shape.dtype]
        buffer, start = reader.buffer, region.offset + layout.token_ids_offset
        ids_T = np.frombuffer(buffer[start : start + 8 * layout.num_rows], dtype="<i8")
        states = []
        for index in range(len(self._shape.names)):
            start = region.offset + layout.state_offset(index)
            flat = np.frombuffer(buffer[start : start + layout.state_bytes], dtype=dtype)
            states.append(flat.reshape(layout.num_rows, self._shape.hidden_size))
        return ids_T, tuple(states)


class _Hold:
    """Counts who still needs a region; the last one frees it."""

    def __init__(self, reader: RingReader, region: Region) -> None:
        self._reader, self._region, self._count, self._lock = reader, region, 1, threading.Lock()

    def share(self) -> Callable[[], None]:
        with self._lock:
            self._count += 1
        return self.let_go

    def let_go(self) -> None:
        with self._lock:
            self._count -= 1
            last = self._count == 0
        if last:
            self._reader.free(self._region)


def _covered(spans: Sequence[tuple[int, int]], num_tokens: int) -> int:
    """Count the rows 0..num_tokens-1 that at least one span holds."""
    end = total = 0
    for first, last in sorted(spans):
        total += max(0, min(last, num_tokens) - max(first, end))
        end = max(end, last)
    return total


def _nothing() -> None:
    return None
