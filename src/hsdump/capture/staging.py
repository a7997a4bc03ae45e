"""Where rows wait on the device for their copy to the host: memory of a fixed size, taken when the model is loaded.

A CUDA graph's next replay overwrites the tensors that the tap sees, so rows are cloned before they are copied. Clones
from the allocator would come on top of a pass's peak, as much as the widest batch has, twice where two batches overlap
(measured: 604 MB at a peak, 973 MB reserved, for batches of 268 MB); a server that was given nearly all of the GPU's
memory has no such room.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

ALIGNMENT = 256
PIECES = 8
"""A piece is at most such a part of the memory, so that a batch that is larger than all of it flows through."""

SLACK = 1.125
"""Of a whole batch's bytes: pieces do not fill the memory to its end before they start at its front again."""

Ticket = TypeVar("Ticket")


def staging_bytes(rows_per_pass: int, bytes_per_row: int, limit: int) -> int:
    """Give what a process should take: room for all rows of a pass, or the limit.

    Args:
        rows_per_pass: that this process copies.
        bytes_per_row: of all states together.
        limit: never more, as long as eight rows fit.
    """
    wanted = int(SLACK * rows_per_pass * bytes_per_row)
    return max(min(wanted, limit), PIECES * (bytes_per_row + ALIGNMENT))


class Spans(Generic[Ticket]):
    """Spans of the memory in use, handed out round and round. One stream frees them, in the order of `put`."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._head = 0
        self._used: deque[tuple[int, int, Ticket]] = deque()

    @property
    def largest(self) -> int:
        """Bytes of the largest piece."""
        return self.num_bytes // PIECES // ALIGNMENT * ALIGNMENT

    def take(self, num_bytes: int) -> tuple[int, Ticket | None]:
        """Give the start of a free span, and what has to be waited for until it is free (None: it is)."""
        num_bytes += -num_bytes % ALIGNMENT
        start, passed = self._head, self.num_bytes
        if start + num_bytes > self.num_bytes:
            start, passed = 0, self._head  # what lies behind the head is the oldest, and is passed over
        end = start + num_bytes
        ticket = None
        while self._used and (self._used[0][0] >= passed or _overlap(self._used[0], start, end)):
            ticket = self._used.popleft()[2]
        self._head = end
        return start, ticket

    def put(self, start: int, num_bytes: int, ticket: Ticket) -> None:
        """Note a span as in use until its ticket is due."""
        self._used.append((start, start + num_bytes, ticket))


def _overlap(span: tuple[int, int, object], start: int, end: int) -> bool:
    return span[0] < end and start < span[1]
