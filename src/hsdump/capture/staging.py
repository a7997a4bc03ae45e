"""Where rows wait on the device for their copy to the host: memory of a fixed size, taken when the model is loaded.

A CUDA graph's next replay overwrites the tensors that the tap sees, so rows are cloned before they are copied. Clones
from the allocator would come on top of a pass's peak, as much as the widest batch has, twice where two batches overlap
(measured: 604 MB at a peak, 973 MB reserved, for batches of 268 MB); a server that was given nearly all of the GPU's
memory has no such room. The memory of one batch is enough: its copies are done in 5 to 9 ms, and the next one comes a
whole forward pass later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Block:
    """One tensor of a batch."""

    num_rows: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        return _aligned(self.num_rows * self.row_bytes)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one block and their place in the memory."""

    block: int
    first: int
    last: int
    offset: int


def staging_bytes(rows_per_pass: int, bytes_per_row: int, limit: int) -> int:
    """Give what a process should take: room for all rows of a pass, or the limit.

    Args:
        rows_per_pass: that this process copies.
        bytes_per_row: of all states and the token id together.
        limit: never more, as long as a few rows fit.
    """
    room_for_alignment = 64 * ALIGNMENT
    return max(min(rows_per_pass * bytes_per_row, limit), 2 * bytes_per_row) + room_for_alignment


def rows_beyond(blocks: Sequence[Block], capacity: int) -> int:
    """Give how many of the last block's rows have to stay out, so that the rest fits at once.

    Returns:
        0 when all fits, or when not even leaving out all of the last block is enough.
    """
    surplus = sum(block.num_bytes for block in blocks) - capacity
    last = blocks[-1]
    rows = -(-surplus // last.row_bytes)
    return rows if 0 < rows <= last.num_rows else 0


def rounds_of(blocks: Sequence[Block], capacity: int, skip: int = 0) -> list[list[Piece]]:
    """Place the rows of all blocks in the memory, in as many rounds as it takes; mostly one.

    Args:
        skip: leave out so many rows at the front of the last block.
    """
    rounds: list[list[Piece]] = [[]]
    offset = 0
    for number, block in enumerate(blocks):
        first = skip if number == len(blocks) - 1 else 0
        while first < block.num_rows:
            room = (capacity - offset) // block.row_bytes
            if room < 1:
                assert offset, f"a row of {block.row_bytes} bytes does not fit into {capacity}"
                rounds.append([])
                offset = 0
                continue
            last = min(first + room, block.num_rows)
            rounds[-1].append(Piece(number, first, last, offset))
            offset += _aligned((last - first) * block.row_bytes)
            first = last
    return rounds


def _aligned(num_bytes: int) -> int:
    return num_bytes + -num_bytes % ALIGNMENT
