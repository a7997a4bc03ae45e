"""The ring for accelerators, both ends in one process: order, wrap-around, refusal, several ranks, replays."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from hsdump.capture.batch import BatchStates, segments_of
from hsdump.capture.ring_tap import RingTap
from hsdump.engines.handover import RingHandOver
from hsdump.engines.rows import Rows
from hsdump.errors import SpoolError
from hsdump.schema import StateShape
from hsdump.spool.names import Rid, SpoolPaths, new_run
from hsdump.spool.reader import FailedNote
from hsdump.spool.ring import RegionLayout, RingReader, RingSegment, RingWriter, read_counters
from hsdump.spool.writer import SpoolWriter

HIDDEN = 8
SHAPE = StateShape(layers=(2, 4), hidden_size=HIDDEN, dtype="bfloat16", final_state="post_norm")


class Rig:
    """Rings of so many tensor-parallel ranks and the client that empties them."""

    def __init__(self, root: Path, *, data_bytes: int = 1 << 20, ranks: int = 1) -> None:
        for folder in SpoolPaths(root).folders():
            folder.mkdir(exist_ok=True)
        self.notes = SpoolWriter(root, SHAPE, max_bytes=1 << 20)
        self.rings = [RingWriter(root / f"ring-{rank}", SHAPE, data_bytes) for rank in range(ranks)]
        self.taps = [
            RingTap(ring, self.notes, device="cpu", share=(rank, ranks)) for rank, ring in enumerate(self.rings)
        ]
        self.run = new_run()
        self.client = RingHandOver(root, self.run, [root / f"ring-{rank}" for rank in range(ranks)], SHAPE)

    def rid(self, number: int, num_tokens: int, *, expected: bool = True) -> Rid:
        rid = Rid(self.run, f"{number:032x}", 0, num_tokens)
        if expected:
            self.client.expect(rid)
        return rid

    def states_of(self, rid: Rid) -> list[torch.Tensor]:
        seed = torch.Generator().manual_seed(int(rid.key, 16))
        return [torch.randn(rid.num_tokens, HIDDEN, generator=seed).bfloat16() for _ in SHAPE.names]

    def batch(self, pieces: list[tuple[Rid | None, int, int]], *, padding: int = 0) -> None:
        """Run one pass over (request, position, rows) pieces on every rank; None stands for another's request."""
        names = [str(rid) if rid else "somebody" for rid, _, _ in pieces]
        segments = segments_of(names, [start for _, start, _ in pieces], [rows for *_, rows in pieces])
        columns: list[list[torch.Tensor]] = [[] for _ in SHAPE.names]
        ids = []
        for rid, start, rows in pieces:
            whole = self.states_of(rid) if rid else [torch.full((start + rows, HIDDEN), float("nan")).bfloat16()] * 3
            for column, state in zip(columns, whole, strict=True):
                column.append(state[start : start + rows])
            ids.append(torch.arange(start, start + rows) + (int(rid.key, 16) if rid else -(10**6)))
        pad = torch.full((padding, HIDDEN), float("nan")).bfloat16()
        joined = [torch.cat([*column, pad]) for column in columns]
        batch = BatchStates(torch.cat([*ids, torch.full((padding,), -1)]), joined[:-1], joined[-1])
        for tap in self.taps:
            tap.take(segments, batch)

    def outcome(self, rid: Rid) -> Rows | FailedNote:
        for _ in range(2000):
            found = self.client.poll(rid)
            if found is not None:
                return found
            time.sleep(0.001)
        raise AssertionError(f"no outcome: {self.client.missing(rid)}")

    def check(self, rid: Rid) -> None:
        rows = self.outcome(rid)
        assert isinstance(rows, Rows)
        first = int(rid.key, 16)
        assert rows.token_ids.tolist() == list(range(first, first + rid.num_tokens))
        for found, expected in zip(rows.states, self.states_of(rid), strict=True):
            assert np.array_equal(found, expected.view(torch.int16).numpy().view(np.uint16))
        rows.release()


def make_folder(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_chunks_in_mixed_batches_become_whole_samples(root: Path, ranks: int) -> None:
    rig = Rig(root, ranks=ranks)
    a, b, c = rig.rid(1, 10), rig.rid(2, 5), rig.rid(3, 1)
    rig.batch([(a, 0, 4), (None, 3, 7), (b, 0, 2)])
    rig.batch([(None, 0, 1), (b, 2, 3), (c, 0, 1), (a, 4, 1)], padding=9)
    rig.batch([(a, 3, 3)])  # a replay
    rig.batch([(a, 6, 4)])
    for rid in (b, c, a):
        rig.check(rid)
    rig.client.close()
    assert all(ring.used_bytes == 0 for ring in rig.rings)


def test_others_rows_never_enter_the_ring(root: Path) -> None:
    rig = Rig(root)
    a = rig.rid(1, 2)
    rig.batch([(None, 0, 50), (a, 0, 2), (None, 0, 50)], padding=20)
    assert read_counters(root / "ring-0").rows == 2
    rig.check(a)
    rig.client.close()


def test_the_ring_goes_round_many_times(root: Path) -> None:
    """Regions of many sizes, far more bytes than the ring has: nothing is overwritten before it was read."""
    rig = Rig(root, data_bytes=64 << 10)
    sizes = np.random.default_rng(1).integers(1, 200, 300)
    for number, size in enumerate(sizes):
        rid = rig.rid(number, int(size))
        rig.batch([(rid, 0, int(size))])
        rig.check(rid)
    assert rig.rings[0].control.get("reserved") > 20 * (64 << 10)
    rig.client.close()


def test_a_full_ring_refuses_at_once_and_recovers(root: Path) -> None:
    rig = Rig(root, data_bytes=32 << 10)
    a, b, c = rig.rid(1, 200), rig.rid(2, 200), rig.rid(3, 200)
    rig.batch([(a, 0, 200)])
    held = rig.outcome(a)
    assert isinstance(held, Rows)
    rig.batch([(b, 0, 200)])
    rig.batch([(c, 0, 200)])
    note = rig.outcome(c)
    assert isinstance(note, FailedNote)
    assert note.reason == "spool-full"
    rig.check(b)
    held.release()
    d = rig.rid(4, 200)
    rig.batch([(d, 0, 200)])
    rig.check(d)
    rig.client.close()


def test_a_region_larger_than_half_the_ring_fits_an_empty_one(root: Path) -> None:
    """The second does not fit behind the first; the ring goes round for the next try."""
    ring = RingWriter(make_folder(root) / "ring-0", SHAPE, 64 << 10)
    reader = RingReader(root / "ring-0", SHAPE)
    for rows in (560, 700):
        segments = [RingSegment("x", 0, 0, rows)]
        place = ring.reserve(segments)
        if place is None:
            assert reader.poll() is None
            place = ring.reserve(segments)
        assert place is not None
        ring.publish(place[2])
        region = reader.poll()
        assert region is not None
        reader.free(region)
    assert ring.used_bytes == 0


def test_a_copy_that_fails_leaves_no_rows_behind(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(root)
    a, b = rig.rid(1, 5), rig.rid(2, 5)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(rig.taps[0]._copier, "copy", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            rig.batch([(a, 0, 5)])
    rig.batch([(b, 0, 5)])
    rig.check(b)
    assert rig.client.poll(a) is None
    rig.client.close()
    assert rig.rings[0].used_bytes == 0


def test_closing_waits_for_rows_that_are_still_read(root: Path) -> None:
    rig = Rig(root)
    a = rig.rid(1, 5)
    rig.batch([(a, 0, 5)])
    held = rig.outcome(a)
    assert isinstance(held, Rows)
    closer = threading.Thread(target=rig.client.close)
    closer.start()
    closer.join(0.3)
    assert closer.is_alive()
    assert rig.rings[0].used_bytes > 0
    held.release()
    closer.join(10)
    assert not closer.is_alive()
    assert rig.rings[0].used_bytes == 0


def test_forgetting_at_the_moment_of_delivery_gives_the_rows_back(root: Path) -> None:
    rig = Rig(root)
    for number in range(200):
        rid = rig.rid(number, 5)
        rig.batch([(rid, 0, 5)])
        rig.client.forget(rid)
    last = rig.rid(1000, 5)
    rig.batch([(last, 0, 5)])
    rig.check(last)
    rig.client.close()
    assert rig.rings[0].used_bytes == 0


def test_too_few_rows_are_an_error_before_anything_is_copied() -> None:
    state = torch.zeros(3, HIDDEN).bfloat16()
    with pytest.raises(ValueError, match="5 are needed"):
        BatchStates(torch.arange(5), [state, state], state).columns(2, HIDDEN, 5)


def test_the_longest_ids_of_requests_that_generate_pass_whole(root: Path) -> None:
    """From 100,000 tokens on they have more than 64 characters."""
    rig = Rig(root, data_bytes=16 << 20)
    rid = Rid(rig.run, f"{1:032x}", 0, 262_144 + 8, 262_144)
    rig.client.expect(rid)
    rig.batch([(rid, 0, rid.num_tokens)])
    rig.check(rid)
    longest = Rid(rig.run, "a" * 32, 9999, 10**9 - 1, 10**9 - 1)
    assert Rid.parse(str(longest)) == longest
    ring = RingWriter(root / "ring-1", SHAPE, 64 << 10)
    place = ring.reserve([RingSegment(str(longest), 0, 0, 1)])
    assert place is not None
    ring.publish(place[2])
    region = RingReader(root / "ring-1", SHAPE).poll()
    assert region is not None
    assert region.segments == (RingSegment(str(longest), 0, 0, 1),)


def test_a_ring_of_another_release_is_refused(root: Path) -> None:
    RingWriter(make_folder(root) / "ring-0", SHAPE, 64 << 10).control.set(
        "magic", int.from_bytes(b"HSDRING1", "little")
    )
    with pytest.raises(ValueError, match="is no ring"):
        RingReader(root / "ring-0", SHAPE)


def test_rows_nobody_waits_for_are_dropped(root: Path) -> None:
    rig = Rig(root, data_bytes=32 << 10)
    for number in range(50):
        rig.batch([(rig.rid(number, 150, expected=False), 0, 150)])
        awaited = rig.rid(1000 + number, 10)
        rig.batch([(awaited, 0, 10)])
        rig.check(awaited)
    forgotten = rig.rid(5000, 20)
    rig.batch([(forgotten, 0, 10)])
    rig.client.forget(forgotten)
    rig.batch([(forgotten, 10, 10)])
    last = rig.rid(6000, 10)
    rig.batch([(last, 0, 10)])
    rig.check(last)
    rig.client.close()


def test_one_client_at_a_time_and_the_next_one_starts_clean(root: Path) -> None:
    rig = Rig(root)
    with pytest.raises(SpoolError, match="another run is extracting"):
        RingHandOver(root, new_run(), [root / "ring-0"], SHAPE)
    rig.batch([(rig.rid(1, 5, expected=False), 0, 5)])
    rig.client.close()
    rig.client = RingHandOver(root, rig.run, [root / "ring-0"], SHAPE)
    a = rig.rid(2, 5)
    rig.batch([(a, 0, 5)])
    rig.check(a)
    rig.client.close()


def test_what_is_no_ring_or_damaged_says_so(root: Path) -> None:
    rig = Rig(root)
    (root / "ring-9").write_bytes(bytes(8192))
    with pytest.raises(ValueError, match="is no ring"):
        RingReader(root / "ring-9", SHAPE)
    offset, _, end = rig.rings[0].reserve([RingSegment("x", 0, 0, 5)]) or (0, None, 0)
    rig.rings[0].map[offset : offset + 16] = b"\xff" * 16
    rig.rings[0].publish(end)
    waiting = rig.rid(1, 5)
    rig.client._collector._thread.join(5)
    with pytest.raises(SpoolError, match="the server's ring is damaged"):
        rig.client.poll(waiting)
    rig.client.close()


def test_the_layout_is_the_same_arithmetic_on_both_sides() -> None:
    layout = RegionLayout(SHAPE, num_rows=5, num_segments=2)
    assert layout.token_ids_offset == 4096
    assert [layout.state_offset(index) for index in range(3)] == [4096 + 64, 4096 + 192, 4096 + 320]
    assert layout.total_bytes == 8192
