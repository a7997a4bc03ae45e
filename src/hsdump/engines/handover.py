"""The two ways in which a server hands rows over, behind one face.

`files` works on any device and for several clients at once. `ring` is for accelerators: asynchronous copies into
registered memory, one client at a time.

Letters: S = tokens of one request, H = hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import numpy as np

from hsdump.arrays import NUMPY_DTYPES
from hsdump.engines.ring_collector import RingCollector
from hsdump.engines.rows import Rows
from hsdump.errors import SpoolError
from hsdump.locks import AliveLock
from hsdump.schema import StateShape
from hsdump.spool.names import Rid
from hsdump.spool.reader import FailedNote, ReadyEntry, SpoolReader

CLOSE_WAIT_S = 60.0
"""How long rows may take from the ring to the store's file when the ring is closed."""


class HandOver(Protocol):
    """One client run's end of a server's hand-over."""

    @property
    def broken(self) -> bool:
        """Tell whether nothing will come through it any more."""

    @property
    def room(self) -> float:
        """Share of the memory that takes rows for certain, beside what is known to be on its way."""

    def expect(self, rid: Rid) -> None:
        """Announce a request before it is sent."""

    def poll(self, rid: Rid) -> Rows | FailedNote | None:
        """Give a request's outcome once, or None while there is none.

        Raises:
            SpoolError: what the server handed over is damaged.
        """

    def forget(self, rid: Rid) -> None:
        """Drop whatever there is, and still comes, of a request that nobody waits for."""

    def missing(self, rid: Rid) -> str:
        """Say how far a request got that has no outcome."""

    def close(self) -> None:
        """Give everything back."""


class FilesHandOver:
    """Entries by rename, in the spool's folders."""

    def __init__(self, root: Path, run: str) -> None:
        """See `SpoolReader`."""
        self.reader = SpoolReader(root, run)

    @property
    def broken(self) -> bool:
        return False

    @property
    def room(self) -> float:
        return 1.0  # each entry's memory is free when the entry is

    def expect(self, rid: Rid) -> None:
        """Nothing to do: an entry waits in its folder."""

    def poll(self, rid: Rid) -> Rows | FailedNote | None:
        found = self.reader.take(rid)
        return _rows_of(found) if isinstance(found, ReadyEntry) else found

    def forget(self, rid: Rid) -> None:
        self.reader.forget(rid)

    def missing(self, rid: Rid) -> str:
        return "the server began its entry" if self.reader.rows_so_far(rid) else "the server never began its entry"

    def close(self) -> None:
        self.reader.close()


class RingHandOver:
    """Rows through the rings, refusals through the spool's folders."""

    def __init__(self, root: Path, run: str, rings: Sequence[Path], shape: StateShape) -> None:
        """Raises:
        SpoolError: another run empties the rings, or they cannot be read.
        """
        self.reader = SpoolReader(root, run)
        try:
            self._lock = AliveLock(self.reader.paths.ring_lock)
        except BlockingIOError:
            self.reader.close()
            raise SpoolError(
                f"another run is extracting from the server of {root}; its ring has one reader",
                "wait for it, or start the server with hsdump serve --hand-over files, which allows several",
            ) from None
        try:
            self._collector = RingCollector(rings, shape)
        except SpoolError:
            self._lock.release()
            self.reader.close()
            raise
        self._futures: dict[Rid, Future[Rows]] = {}
        self._closed = False

    @property
    def broken(self) -> bool:
        return self._closed or self._collector.error is not None

    @property
    def room(self) -> float:
        return self._collector.room

    def expect(self, rid: Rid) -> None:
        self._futures[rid] = self._collector.expect(rid)

    def poll(self, rid: Rid) -> Rows | FailedNote | None:
        future = self._futures.get(rid)
        if future is not None and future.done():
            return self._futures.pop(rid).result()
        if self._closed:
            return FailedNote("connection-lost", "the hand-over was closed while rows were on their way")
        if self._collector.error is not None:
            raise SpoolError(f"the server's ring is damaged ({self._collector.error})", "start the server again")
        note = self.reader.take(rid)
        return note if isinstance(note, FailedNote) else None

    def forget(self, rid: Rid) -> None:
        future = self._futures.pop(rid, None)
        self._collector.forget(rid)
        if future is not None:
            _release_when_done(future)
        self.reader.forget(rid)

    def missing(self, rid: Rid) -> str:
        return f"{self._collector.rows_of(rid)} of {rid.num_tokens} rows came through the ring"

    def close(self) -> None:
        """Stop, and give the ring back only when nobody looks at its memory any more: rows that are on their way to
        the store must not be overwritten by the next reader's.
        """
        self._closed = True
        self._collector.close()
        deadline_s = time.monotonic() + CLOSE_WAIT_S
        while self._collector.num_held and time.monotonic() < deadline_s:
            for rid in [rid for rid, future in self._futures.items() if future.done()]:
                # Its waiter takes it within a moment, if there still is one.
                if time.monotonic() > deadline_s - CLOSE_WAIT_S + 1.0 and (late := self._futures.pop(rid, None)):
                    _release_when_done(late)
            time.sleep(0.01)
        if self._collector.num_held:
            raise SpoolError(
                f"rows of the server's ring were still being read {CLOSE_WAIT_S:.0f} s after it was closed",
                "start the extraction again: it goes on where it stopped",
            )
        self._lock.release()
        self.reader.close()


def _release_when_done(future: Future[Rows]) -> None:
    """Give rows back that nobody will take, also when they are being delivered at this moment."""

    def release(done: Future[Rows]) -> None:
        if not done.cancelled():
            done.result().release()

    future.add_done_callback(release)


def _rows_of(entry: ReadyEntry) -> Rows:
    shape = entry.layout.shape
    states = tuple(
        np.frombuffer(entry.state(index), dtype=NUMPY_DTYPES[shape.dtype]).reshape(-1, shape.hidden_size)
        for index in range(len(shape.names))
    )
    return Rows(np.frombuffer(entry.token_ids(), dtype="<i8"), states, entry.release)
