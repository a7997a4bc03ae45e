"""The hand-over for accelerators: one ring of memory that a server process copies into and a client reads from.

A file `<spool>/ring-<pid>` in shared memory:

    control page   8-byte counters, each in its own cache line (see `Control`); counters only ever grow
    data area      regions, one a forward pass, each at a multiple of 4096: header, token ids, then the states

A region holds the rows of hsdump's requests of one pass, packed: `token_ids` int64 [T], then each state [T, H]. Its
header lists which rows belong to which request. The server publishes regions in order, the client frees them in order;
neither waits for the other: a region that does not fit is not written, and its requests are told so.

Standard library only. Letters: T = rows of one region, H = hidden size.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hsdump.schema import StateShape

MAGIC = 0x32474E4952445348  # "HSDRING2", little endian; a new one whenever a struct below changes
PAGE = 4096
ALIGN = 64

_HEADER = struct.Struct("<4sIQII")  # kind, version, region bytes, rows, segments
_SEGMENT = struct.Struct("<80sIII4x")  # rid (74 bytes at most), first row in the region, position in the request, rows
_VERSION = 2
_BATCH, _SKIP = b"ROWS", b"SKIP"


@dataclass(frozen=True, slots=True)
class RingSegment:
    """Consecutive rows of a region that belong to one request."""

    rid: str
    first_row: int
    position: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """Where the blocks of a region lie, from the region's first byte. Pure arithmetic, the same on both sides."""

    shape: StateShape
    num_rows: int
    num_segments: int

    @property
    def token_ids_offset(self) -> int:
        return _up(_HEADER.size + self.num_segments * _SEGMENT.size, PAGE)

    def state_offset(self, index: int) -> int:
        first = self.token_ids_offset + _up(8 * self.num_rows, ALIGN)
        return first + index * _up(self.state_bytes, ALIGN)

    @property
    def state_bytes(self) -> int:
        return self.num_rows * self.shape.row_bytes

    @property
    def total_bytes(self) -> int:
        return _up(self.state_offset(len(self.shape.names)), PAGE)


@dataclass(frozen=True, slots=True)
class Region:
    """One published region, as the client sees it."""

    offset: int
    """Of its first byte, in the data area."""

    end: int
    """The counter value that frees it."""

    layout: RegionLayout
    segments: tuple[RingSegment, ...]


class Control:
    """The counters at the head of a ring. An aligned 8-byte store is atomic on the machines SGLang runs on."""

    _FIELDS = (
        "magic",
        "data_bytes",
        "reserved",
        "published",
        "freed",
        "refused",
        "batches",
        "rows",
        "busy_ns",
        "late_ns",
    )

    def __init__(self, page: memoryview) -> None:
        self._words = page.cast("Q")

    def get(self, field: str) -> int:
        return self._words[8 * self._FIELDS.index(field)]

    def set(self, field: str, value: int) -> None:
        self._words[8 * self._FIELDS.index(field)] = value

    def add(self, field: str, value: int) -> None:
        """Add to a counter that has one writer."""
        self._words[8 * self._FIELDS.index(field)] += value


@dataclass(frozen=True, slots=True)
class RingCounters:
    """What capture cost one process so far."""

    batches: int
    rows: int
    refused: int
    """Regions that did not fit."""

    busy_ns: int
    """Of the scheduler's own thread."""

    late_ns: int
    """From the end of the tap to the publication of its region, added up: the copies, not anybody's waiting."""

    used_bytes: int
    data_bytes: int


def read_counters(path: Path) -> RingCounters:
    """Read a ring's counters, from any process of this host."""
    with path.open("rb") as file:
        control = Control(memoryview(bytearray(file.read(PAGE))))
    return RingCounters(
        batches=control.get("batches"),
        rows=control.get("rows"),
        refused=control.get("refused"),
        busy_ns=control.get("busy_ns"),
        late_ns=control.get("late_ns"),
        used_bytes=control.get("reserved") - control.get("freed"),
        data_bytes=control.get("data_bytes"),
    )


class RingWriter:
    """The server's end. `reserve`, copy into the region, `publish`: in that order, one thread each."""

    def __init__(self, path: Path, shape: StateShape, data_bytes: int) -> None:
        """Create the ring with all its memory, so that nothing can run out of it later.

        Raises:
            OSError: not so much shared memory.
        """
        self.shape, self.data_bytes = shape, _up(data_bytes, PAGE)
        path.unlink(missing_ok=True)  # of a process that had this number before: ours holds its lock
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, PAGE + self.data_bytes)
            self.map = mmap.mmap(fd, PAGE + self.data_bytes)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(fd)
        self.control = Control(memoryview(self.map)[:PAGE])
        self.control.set("data_bytes", self.data_bytes)
        self.control.set("magic", MAGIC)

    def reserve(self, segments: Sequence[RingSegment]) -> tuple[int, RegionLayout, int] | None:
        """Take room for a region and write its header.

        Returns:
            Offset of the region in the file, its layout, and the counter value to publish; None when it does not fit
            now, which is never waited for.
        """
        layout = RegionLayout(self.shape, sum(segment.num_rows for segment in segments), len(segments))
        reserved, freed = self.control.get("reserved"), self.control.get("freed")
        start = reserved % self.data_bytes
        skip = self.data_bytes - start if start + layout.total_bytes > self.data_bytes else 0
        if reserved + skip + layout.total_bytes - freed > self.data_bytes:
            self.control.add("refused", 1)
            if skip and reserved == freed:
                # Nothing is in the ring, only its end is in the way: go round, so that the next try fits.
                self._write_header(start, _SKIP, skip, 0, ())
                self.control.set("reserved", reserved + skip)
                self.publish(reserved + skip)
            return None
        if skip:
            self._write_header(start, _SKIP, skip, 0, ())
            reserved, start = reserved + skip, 0
        self._write_header(start, _BATCH, layout.total_bytes, layout.num_rows, segments)
        end = reserved + layout.total_bytes
        self.control.set("reserved", end)
        return PAGE + start, layout, end

    def cancel(self, offset: int, layout: RegionLayout) -> None:
        """Turn a reserved region into one without rows; it still has to be published."""
        self._write_header(offset - PAGE, _SKIP, layout.total_bytes, 0, ())

    def publish(self, end: int) -> None:
        """Show everything up to `end` to the client; call in the order of `reserve`."""
        self.control.set("published", end)

    @property
    def used_bytes(self) -> int:
        return self.control.get("reserved") - self.control.get("freed")

    def _write_header(
        self, start: int, kind: bytes, num_bytes: int, rows: int, segments: Sequence[RingSegment]
    ) -> None:
        at = PAGE + start
        _HEADER.pack_into(self.map, at, kind, _VERSION, num_bytes, rows, len(segments))
        for number, segment in enumerate(segments):
            place = at + _HEADER.size + number * _SEGMENT.size
            fields = (segment.rid.encode(), segment.first_row, segment.position, segment.num_rows)
            _SEGMENT.pack_into(self.map, place, *fields)


class RingReader:
    """The client's end: regions in order, freed in order of their end whatever the order of `free`."""

    def __init__(self, path: Path, shape: StateShape) -> None:
        """Raises:
        OSError, ValueError: no ring there.
        """
        self.shape = shape
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.buffer = memoryview(self._map)
        self._control = Control(self.buffer[:PAGE])
        self.data_bytes = self._control.get("data_bytes")
        if self._control.get("magic") != MAGIC or self.data_bytes != len(self._map) - PAGE:
            raise ValueError(f"{path} is no ring")
        self._next = self._control.get("freed")
        self._held: dict[int, bool] = {}
        self._largest = 0
        self._lock = threading.Lock()  # one thread polls, others free

    def poll(self) -> Region | None:
        """Give the next published region, or None. A region is held until `free`."""
        with self._lock:
            while self._next < self._control.get("published"):
                region = self._step()
                if region is not None:
                    return region
        return None

    def free(self, region: Region) -> None:
        """Give a region's memory back to the server, once all earlier ones are."""
        with self._lock:
            self._held[region.end] = False
            self._advance()

    @property
    def room(self) -> float:
        """Share of the ring that takes rows for certain: memory that was freed out of turn counts as taken, and so does
        as much as the largest region so far, which is what goes round may leave at the ring's end.
        """
        taken = self._control.get("reserved") - self._control.get("freed") + self._largest
        return max(1.0 - taken / self.data_bytes, 0.0)

    @property
    def num_held(self) -> int:
        """Regions that somebody still reads."""
        with self._lock:
            return sum(self._held.values())

    def close(self) -> None:
        """Pass over what was not polled. Regions still held keep their memory until they are freed."""
        while (region := self.poll()) is not None:
            self.free(region)

    def _step(self) -> Region | None:
        start = self._next % self.data_bytes
        kind, version, num_bytes, rows, count = _HEADER.unpack_from(self._map, PAGE + start)
        if version != _VERSION or not 0 < num_bytes <= self.data_bytes - start:
            raise ValueError(f"a damaged region at {start}: {kind!r}, version {version}, {num_bytes} bytes")
        end = self._next + num_bytes
        self._next = end
        if kind == _SKIP:
            self._held[end] = False
            self._advance()
            return None
        layout = RegionLayout(self.shape, rows, count)
        if layout.total_bytes != num_bytes:
            raise ValueError(f"a region of {num_bytes} bytes, its {rows} rows take {layout.total_bytes}")
        self._held[end] = True
        self._largest = max(self._largest, num_bytes)
        return Region(PAGE + start, end, layout, self._segments(PAGE + start, count))

    def _segments(self, at: int, count: int) -> tuple[RingSegment, ...]:
        found = []
        for number in range(count):
            rid, *rest = _SEGMENT.unpack_from(self._map, at + _HEADER.size + number * _SEGMENT.size)
            found.append(RingSegment(rid.rstrip(b"\0").decode("ascii", "replace"), *rest))
        return tuple(found)

    def _advance(self) -> None:
        while self._held:
            first = next(iter(self._held))
            if self._held[first]:
                return
            del self._held[first]
            self._control.set("freed", max(first, self._control.get("freed")))


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
