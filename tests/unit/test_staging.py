"""Device memory that rows pass through: every row once, none beside another, as little waiting as there can be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hsdump.capture.staging import ALIGNMENT, Block, rounds_of, rows_beyond, staging_bytes

BLOCKS = st.lists(st.builds(Block, st.integers(1, 500), st.integers(1, 3000)), min_size=1, max_size=6)


@given(BLOCKS, st.integers(3000, 200_000), st.booleans())
def test_every_row_has_a_place_of_its_own(blocks: list[Block], capacity: int, leave_out: bool) -> None:
    skip = rows_beyond(blocks, capacity) if leave_out else 0
    rounds = rounds_of(blocks, capacity, skip)
    rows = [(piece.block, row) for one in rounds for piece in one for row in range(piece.first, piece.last)]
    wanted = [(number, row) for number, block in enumerate(blocks) for row in range(block.num_rows)]
    left_out = [(len(blocks) - 1, row) for row in range(skip)]
    assert sorted(rows + left_out) == wanted
    for one in rounds:
        end = 0
        for piece in one:
            assert piece.offset >= end, "two pieces of a round overlap"
            assert piece.offset % ALIGNMENT == 0
            end = piece.offset + (piece.last - piece.first) * blocks[piece.block].row_bytes
        assert end <= capacity
    if skip or sum(block.num_bytes for block in blocks) <= capacity:
        assert len(rounds) == 1, "nothing of a batch waits for another part of it"


def test_a_whole_pass_fits_at_once() -> None:
    """The Llama-3.1-8B shape: token ids and four states of 8,192 rows."""
    blocks = [Block(8192, 8), *[Block(8192, 8192)] * 4]
    capacity = staging_bytes(8192, 4 * 8192 + 8, 380_000_000)
    assert capacity < 270_000_000
    assert (rows_beyond(blocks, capacity), len(rounds_of(blocks, capacity))) == (0, 1)


def test_a_wider_pass_leaves_rows_of_its_last_state_out() -> None:
    """Kimi's width on one GPU: 470 MB."""
    blocks = [Block(8192, 8), *[Block(8192, 14_336)] * 4]
    capacity = staging_bytes(8192, 4 * 14_336 + 8, 380_000_000)
    rows = rows_beyond(blocks, capacity)
    assert 6000 < rows < 6500
    assert len(rounds_of(blocks, capacity, rows)) == 1


def test_a_pass_far_beyond_it_goes_in_rounds() -> None:
    blocks = [Block(16_384, 8), *[Block(16_384, 14_336)] * 4]
    assert rows_beyond(blocks, 380_000_000) == 0
    assert len(rounds_of(blocks, 380_000_000)) == 3


def test_a_tiny_limit_still_takes_a_row() -> None:
    assert staging_bytes(8192, 57_352, 1) >= 57_352
