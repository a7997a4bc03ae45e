"""Rows to their place: chunks, batches, padding, replays and everything that must be refused instead."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from hsdump.capture.batch import BatchStates, Segment, decode_segments, segments_of, split_late
from hsdump.capture.tap import STALE_S, Tap
from hsdump.schema import StateShape
from hsdump.spool.names import Rid, SpoolPaths, new_run
from hsdump.spool.reader import FailedNote, ReadyEntry, SpoolReader
from hsdump.spool.writer import SpoolWriter

HIDDEN = 8
SHAPE = StateShape(layers=(2, 4), hidden_size=HIDDEN, dtype="bfloat16", final_state="post_norm")


class Rig:
    """A tap and the client that reads from it, with states whose every number says whose it is."""

    def __init__(self, root: Path, max_bytes: int = 1 << 24) -> None:
        for folder in SpoolPaths(root).folders():
            folder.mkdir(exist_ok=True)
        self.reader = SpoolReader(root, new_run())
        self.spool = SpoolWriter(root, SHAPE, max_bytes=max_bytes, keep_free_bytes=0)
        self.tap = Tap(self.spool)

    def rid(self, number: int, num_tokens: int) -> Rid:
        return Rid(self.reader.run, f"{number:032x}", 0, num_tokens)

    def states_of(self, rid: Rid) -> list[torch.Tensor]:
        seed = torch.Generator().manual_seed(int(rid.key, 16))
        return [
            torch.randn(rid.num_tokens, HIDDEN, generator=seed, dtype=torch.float32).bfloat16() for _ in SHAPE.names
        ]

    def batch(self, pieces: list[tuple[Rid, int, int]], *, packed: bool = False, padding: int = 0) -> None:
        """Run one forward pass over (request, position, rows) pieces."""
        names = [str(rid) for rid, _, _ in pieces]
        segments = segments_of(names, [start for _, start, _ in pieces], [rows for *_, rows in pieces])
        cut = [[state[start : start + rows] for state in self.states_of(rid)] for rid, start, rows in pieces]
        columns = [torch.cat([piece[i] for piece in cut]) for i in range(len(SHAPE.names))]
        if padding:
            columns = [torch.cat([c, torch.full((padding, HIDDEN), float("nan")).bfloat16()]) for c in columns]
        ids = torch.cat([torch.arange(start, start + rows) + int(rid.key, 16) for rid, start, rows in pieces])
        ids = torch.cat([ids, torch.full((padding,), -1)])
        aux = torch.cat(columns[:-1], dim=-1) if packed else columns[:-1]
        self.tap.take(segments, BatchStates(ids, aux, columns[-1]))

    def check(self, rid: Rid) -> None:
        entry = self.reader.take(rid)
        assert isinstance(entry, ReadyEntry)
        ids = np.frombuffer(entry.token_ids(), "<i8")
        assert ids.tolist() == list(range(int(rid.key, 16), int(rid.key, 16) + rid.num_tokens))
        for index, expected in enumerate(self.states_of(rid)):
            assert bytes(entry.state(index)) == expected.view(torch.uint8).numpy().tobytes()


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "spool")


def test_only_our_rows_are_found_in_a_batch() -> None:
    ours = Rid("00c0ffee", "a" * 32, 0, 9)
    names = ["someone", str(ours), "HEALTH_CHECK_1", "hsdump-but-not-an-id"]
    assert segments_of(names, [0, 4, 0, 0], [7, 5, 1, 2]) == [Segment(ours, 7, 4, 5)]


@pytest.mark.parametrize("packed", [False, True], ids=["list", "packed"])
def test_chunks_of_several_requests_in_mixed_batches_become_whole_entries(rig: Rig, *, packed: bool) -> None:
    a, b, c = rig.rid(1, 10), rig.rid(2, 5), rig.rid(3, 3)
    rig.batch([(a, 0, 4), (b, 0, 2)], packed=packed)
    rig.batch([(b, 2, 3), (c, 0, 3), (a, 4, 1)], packed=packed)
    assert rig.reader.take(a) is None
    rig.check(b)
    rig.check(c)
    rig.batch([(a, 5, 5)], packed=packed, padding=11)
    rig.check(a)


def test_rows_replayed_after_a_retraction_are_harmless(rig: Rig) -> None:
    a = rig.rid(1, 8)
    rig.batch([(a, 0, 4)])
    rig.batch([(a, 0, 3)])
    rig.batch([(a, 3, 3)])
    rig.batch([(a, 6, 2)])
    rig.check(a)


def test_a_prefix_from_the_cache_is_refused_by_name(rig: Rig) -> None:
    a = rig.rid(1, 8)
    rig.batch([(a, 4, 4)])
    note = rig.reader.take(a)
    assert isinstance(note, FailedNote)
    assert note.reason == "prefix-cached"
    assert "rows 0..3 were served from the prefix cache" in note.detail


def test_a_gap_is_refused_and_the_half_entry_goes_away(rig: Rig) -> None:
    a = rig.rid(1, 8)
    rig.batch([(a, 0, 2)])
    rig.batch([(a, 5, 3)])
    assert rig.reader.take(a) == FailedNote("rows-missing", "rows 2..4 were never computed")
    assert list(rig.spool.paths.partial.iterdir()) == []
    rig.batch([(a, 0, 8)])  # late rows of a refused request change nothing
    assert rig.reader.take(a) is None


def test_more_rows_than_the_request_has_tokens_are_refused(rig: Rig) -> None:
    a = rig.rid(1, 4)
    segments = [Segment(a, 0, 0, 6)]
    wide = torch.zeros(6, HIDDEN).bfloat16()
    rig.tap.take(segments, BatchStates(torch.arange(6), [wide, wide], wide))
    assert rig.reader.take(a) == FailedNote("rows-missing", "rows up to 5 arrived for a request of 4 tokens")


def test_a_full_spool_fails_one_request_and_not_the_batch(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "spool", max_bytes=1200)
    small, large = rig.rid(1, 2), rig.rid(2, 900)
    rig.batch([(large, 0, 900), (small, 0, 2)])
    note = rig.reader.take(large)
    assert isinstance(note, FailedNote)
    assert note.reason == "spool-full"
    rig.check(small)


@pytest.mark.parametrize("num_states", [1, 3])
def test_other_widths_than_announced_are_an_error(rig: Rig, num_states: int) -> None:
    state = torch.zeros(2, HIDDEN).bfloat16()
    with pytest.raises(ValueError, match="expected 2 x 8 columns"):
        rig.tap.take(
            [Segment(rig.rid(1, 2), 0, 0, 2)],
            BatchStates(torch.arange(2), torch.cat([state] * num_states, dim=-1), state),
        )
    with pytest.raises(ValueError, match="expected 3 of width 8"):
        BatchStates(torch.arange(2), [state] * num_states, state).columns(2, HIDDEN)


def test_entries_of_vanished_requests_are_let_go(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    swept, stale, fresh = rig.rid(1, 8), rig.rid(2, 8), rig.rid(3, 8)
    rig.batch([(swept, 0, 2), (stale, 0, 2)])
    (rig.spool.paths.partial / str(swept)).unlink()
    import time

    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + STALE_S + 1)
    rig.batch([(fresh, 0, 2)])
    assert [path.name for path in rig.spool.paths.partial.iterdir()] == [str(fresh)]
    rig.batch([(fresh, 2, 6)])
    rig.check(fresh)


def test_entries_of_dead_clients_are_let_go_without_another_capture(rig: Rig) -> None:
    """A sweep takes the name away; the memory goes when the server closes it, before any pass of anybody's."""
    rig.tap.settle()
    a = rig.rid(1, 8)
    rig.batch([(a, 0, 2)])
    fd = rig.tap._open[a].fd
    (rig.spool.paths.partial / str(a)).unlink()
    rig.tap.settle()
    assert rig.tap._open, "no more than one look every few seconds"
    rig.tap._next_housekeeping_s = 0.0
    rig.tap.settle()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_rows_of_decode_steps_follow_those_of_the_prompt(rig: Rig) -> None:
    rid = Rid(rig.reader.run, f"{77:032x}", 0, 6, 4)
    assert Rid.parse(str(rid)) == rid
    assert Rid.parse(f"{rid}9") is None, "a prompt longer than the whole"
    rig.batch([(rid, 0, 4)])
    for seq_len in (5, 6, 7):
        segments = decode_segments(["someone", str(rid)], [90, seq_len])
        # Overlapped scheduling runs one step more than was asked for; nobody wants its row.
        assert segments == ([Segment(rid, 1, seq_len - 1, 1, decode=True)] if seq_len < 7 else [])
        if segments:
            columns = [torch.stack([state[0], state[seq_len - 1]]) for state in rig.states_of(rid)]
            ids = torch.tensor([0, int(rid.key, 16) + seq_len - 1])
            rig.tap.take(segments, BatchStates(ids, columns[:-1], columns[-1]))
    entry = rig.reader.take(rid)
    assert isinstance(entry, ReadyEntry)
    for index, expected in enumerate(rig.states_of(rid)):
        assert bytes(entry.state(index)) == expected.view(torch.uint8).numpy().tobytes()


def test_generated_tokens_that_prefill_computes_again_are_not_decode_rows(rig: Rig) -> None:
    rid, plain = Rid(rig.reader.run, f"{78:032x}", 0, 9, 4), rig.rid(3, 8)
    prompt, again, other = Segment(rid, 0, 0, 4), Segment(rid, 0, 0, 6), Segment(plain, 6, 0, 8)
    assert split_late([prompt, other]) == ([prompt, other], [])
    assert split_late([again, other]) == ([other], [again])
