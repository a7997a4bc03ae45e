"""Device memory that rows pass through: no span is handed out again before its ticket was waited for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hsdump.capture.staging import PIECES, Spans, staging_bytes


@given(st.integers(4096, 100_000), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=300))
def test_what_is_waited_for_covers_what_is_overwritten(size: int, shares: list[float]) -> None:
    spans: Spans[int] = Spans(size)
    written: list[tuple[int, int]] = []
    done = -1  # copies end in order: one that is waited for has those before it behind it
    for ticket, share in enumerate(shares):
        num_bytes = max(1, int(share * spans.largest))
        start, busy = spans.take(num_bytes)
        assert 0 <= start <= start + num_bytes <= size
        done = done if busy is None else max(done, busy)
        for earlier, (first, end) in enumerate(written):
            if first < start + num_bytes and start < end:
                assert earlier <= done, "overwritten while its copy may still run"
        spans.put(start, num_bytes, ticket)
        written.append((start, start + num_bytes))


def test_a_whole_pass_waits_for_nothing_of_itself() -> None:
    """The Llama-3.1-8B shape: 8,192 rows, four states."""
    row = 4096 * 2
    size = staging_bytes(8192, 4 * row, 1 << 40)
    spans: Spans[int] = Spans(size)
    piece = spans.largest // row * row
    for number in range(3):
        for _ in range(4):
            left = 8192 * row
            while left:
                taken = min(piece, left)
                start, busy = spans.take(taken)
                assert busy is None or busy < number
                spans.put(start, taken, number)
                left -= taken


def test_the_limit_holds_unless_rows_would_not_fit() -> None:
    assert staging_bytes(8192, 57_344, 380_000_000) == 380_000_000
    assert staging_bytes(100, 1000, 380_000_000) == 112_500
    tiny: Spans[int] = Spans(staging_bytes(8192, 57_344, 1))
    assert tiny.num_bytes >= PIECES * 57_344
    assert tiny.largest >= 57_344
