"""The client's end of the rings: regions in, whole samples out, each region's memory back as soon as possible.

A thread follows the rings. Rows of a request may come in any number of regions, in any order, from several ranks, and
twice after a retraction; `(position, rows)` places them. A sample whose rows lie in one region is handed out as views
of shared memory, any other is put together in memory of its own.

Letters: S = tokens of one sample, T = rows of a region, H = hidden size.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hsdump.arrays import NUMPY_DTYPES, StateArray
from hsdump.engines.handover import Rows
from hsdump.errors import SpoolError
from hsdump.schema import StateShape
from hsdump.spool.names import Rid
from hsdump.spool.ring import Region, RingReader, RingSegment

SHORTEST_PAUSE_S = 0.0002
LONGEST_PAUSE_S = 0.005


@dataclass(slots=True)
class _Piece:
    """Rows of one request in one region, and the right to keep that region a while."""

    position: int
    token_ids: NDArray[np.int64]
    states: tuple[StateArray, ...]
    let_go: Callable[[], None]


@dataclass(slots=True)
class _Waiting:
    """A request whose rows are coming in."""

    num_tokens: int
    future: Future[Rows]
    pieces: list[_Piece] = field(default_factory=list)


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
        self.rows = 0
        self.error: Exception | None = None
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
            waiting = self._waiting.pop(rid, None)
        if waiting is not None:
            _let_go(waiting.pieces)

    def rows_of(self, rid: Rid) -> int:
        """Count the rows that are in, for an error message."""
        with self._lock:
            waiting = self._waiting.get(rid)
            return _covered(waiting.pieces, waiting.num_tokens) if waiting else 0

    def close(self) -> None:
        """Stop following and give all memory back to the server."""
        self._stop.set()
        self._thread.join()
        for reader in self._readers:
            reader.close()

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
                if waiting is None or rid is None:
                    continue
                waiting.pieces.append(_piece(segment, ids_T, states_TH, hold.share()))
                self.rows += segment.num_rows
                done = _covered(waiting.pieces, waiting.num_tokens) == waiting.num_tokens
                if done:
                    del self._waiting[rid]
            if done:
                waiting.future.set_result(self._assemble(waiting))
        hold.let_go()

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

    def _assemble(self, waiting: _Waiting) -> Rows:
        pieces, num_tokens = waiting.pieces, waiting.num_tokens
        for piece in pieces:
            if piece.position == 0 and len(piece.token_ids) == num_tokens:
                _let_go([other for other in pieces if other is not piece])
                return Rows(piece.token_ids, piece.states, piece.let_go)
        ids_S = np.empty(num_tokens, dtype=np.int64)
        states = tuple(np.empty((num_tokens, self._shape.hidden_size), dtype=s.dtype) for s in pieces[0].states)
        for piece in pieces:
            rows = slice(piece.position, piece.position + len(piece.token_ids))
            ids_S[rows] = piece.token_ids
            for whole, part in zip(states, piece.states, strict=True):
                whole[rows] = part
        _let_go(pieces)
        return Rows(ids_S, states, _nothing)


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


def _piece(
    segment: RingSegment, ids_T: NDArray[np.int64], states_TH: tuple[StateArray, ...], let_go: Callable[[], None]
) -> _Piece:
    rows = slice(segment.first_row, segment.first_row + segment.num_rows)
    return _Piece(segment.position, ids_T[rows], tuple(state[rows] for state in states_TH), let_go)


def _covered(pieces: Sequence[_Piece], num_tokens: int) -> int:
    """Count the rows 0..num_tokens-1 that at least one piece brings."""
    end = total = 0
    for piece in sorted(pieces, key=lambda piece: piece.position):
        last = min(piece.position + len(piece.token_ids), num_tokens)
        total += max(0, last - max(piece.position, end))
        end = max(end, last)
    return total


def _let_go(pieces: Sequence[_Piece]) -> None:
    for piece in pieces:
        piece.let_go()


def _nothing() -> None:
    return None
