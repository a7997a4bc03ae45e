"""The draft vocabulary: what is chosen, what the maps promise, and maps from elsewhere that must be refused."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsdump.cli.main import main
from hsdump.draft.counting import RESERVED, count_tokens, curve, recommended, special_tokens
from hsdump.draft.split import is_held_out
from hsdump.draft.vocab import DraftVocab, choose, default_vocab, load_vocab, save_vocab
from hsdump.errors import InputError, UsageError
from hsdump.store import Store
from tests.draft.making import VOCAB, make_store, make_target

CASES = os.environ.get("HSDUMP_REAL_CASES")


def counts_of(ids: list[int], size: int = 100) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.bincount(np.asarray(ids, dtype=np.int64), minlength=size)


@given(st.lists(st.integers(0, 49), max_size=200), st.integers(1, 50), st.sets(st.integers(0, 49), max_size=5))
def test_the_maps_say_the_same_whatever_was_counted(ids: list[int], size: int, always: set[int]) -> None:
    if len(always) > size:
        return
    vocab = choose(counts_of(ids, 50), size, always)
    assert vocab.d2t.dtype == np.int64
    assert vocab.t2d.dtype == np.bool_
    assert len(vocab.d2t) == size == vocab.t2d.sum()
    assert (np.diff(vocab.target_ids) > 0).all()
    assert always <= set(vocab.target_ids.tolist())
    np.testing.assert_array_equal(vocab.target_ids, np.arange(size) + vocab.d2t)
    np.testing.assert_array_equal(np.flatnonzero(vocab.t2d), vocab.target_ids)


def test_fewer_distinct_tokens_than_asked_for_are_filled_with_the_lowest_ids() -> None:
    """SpecForge#76: 6054 entries came out where 32000 were expected, and loading failed."""
    vocab = choose(counts_of([7, 7, 9, 9, 50]), 16)
    assert vocab.size == 16 == vocab.t2d.sum()
    assert vocab.target_ids.tolist() == [*range(15), 50]
    assert vocab.facts["filled"] == 13


@pytest.mark.parametrize("size", [0, -1, 101, 4.0, True])
def test_sizes_that_make_no_mapping_are_refused(size: Any) -> None:
    """Automodel#2260: these gave nonsense mappings without an error."""
    with pytest.raises(UsageError, match=r"--size is .*, the target vocabulary has 100 tokens"):
        choose(counts_of([1]), size)


def test_an_empty_target_vocabulary_is_refused() -> None:
    with pytest.raises(UsageError, match="the target vocabulary is empty"):
        choose(np.zeros(0, np.int64), 4)


def test_a_size_of_the_whole_vocabulary_is_the_identity() -> None:
    vocab = choose(counts_of([3, 4]), 100)
    assert not vocab.d2t.any()
    assert vocab.t2d.all()
    assert vocab.digest == DraftVocab.exact(100).digest


def test_special_tokens_are_in_even_when_nobody_says_them() -> None:
    assert {0, 99} <= set(choose(counts_of([5, 5, 6]), 4, [0, 99]).target_ids.tolist())
    with pytest.raises(UsageError, match="3 special, stop, thinking and tool tokens are always in"):
        choose(counts_of([5]), 2, [0, 1, 2])
    with pytest.raises(UsageError, match="special token 100 is outside"):
        choose(counts_of([5]), 8, [100])


def test_only_tokens_under_the_mask_count(tmp_path: Path) -> None:
    """SpecForge#765: a token that is frequent in prompts alone is nothing that the target says."""
    store = make_store(tmp_path / "store", tmp_path / "nowhere")
    with Store(store) as opened:
        counts = count_tokens(opened, 0.25, lambda _samples, _bytes: None)
        expected = np.zeros(VOCAB, np.int64)
        apart = 0
        for sample in opened:
            held_out = is_held_out(sample.key, 0.25)
            apart += held_out
            if not held_out:
                expected += np.bincount(sample.input_ids[sample.loss_mask == 1], minlength=VOCAB)
    np.testing.assert_array_equal(counts.train, expected)
    assert counts.held_out_samples == apart > 0


def test_a_store_that_teaches_nothing_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", tmp_path / "nowhere", samples=0)
    with Store(store) as opened, pytest.raises(InputError, match="no token of its 0 samples is under the loss mask"):
        count_tokens(opened, 0.0, lambda _samples, _bytes: None)


def test_the_curve_rises_and_the_recommendation_covers() -> None:
    from hsdump.draft.counting import Counts

    rng = np.random.default_rng(0)
    made = [np.bincount(rng.zipf(1.3, 20000) % 500, minlength=512) for _ in range(2)]
    counts = Counts(train=made[0], held_out=made[1], samples=9, held_out_samples=1)
    rows = curve(counts, {0, 1})
    assert [row["size"] for row in rows] == sorted(row["size"] for row in rows)
    assert all(one["train"] <= other["train"] for one, other in itertools.pairwise(rows))
    assert rows[-1]["held_out"] == 1.0
    assert next(row for row in rows if row["size"] == recommended(rows))["held_out"] >= 0.995


def test_a_file_gives_the_maps_back(tmp_path: Path) -> None:
    vocab = choose(counts_of([5, 6, 7, 90]), 8, [1])
    save_vocab(vocab, tmp_path / "v.safetensors")
    again = load_vocab(tmp_path / "v.safetensors", 100)
    assert again.digest == vocab.digest
    assert again.facts["always"] == 1
    with pytest.raises(InputError, match="is for a target of 100 tokens, this one has 90"):
        load_vocab(tmp_path / "v.safetensors", 90)


@pytest.mark.parametrize(
    ("d2t", "t2d", "complaint"),
    [
        (np.arange(4) * 3, None, None),
        (np.array([5, 5, 5], np.int64), np.zeros(20, bool), "d2t and t2d name different tokens"),
        (np.array([0, 0, 30], np.int64), None, "it proposes token 32, the target has 20"),
        (np.array([4, 3, 2], np.int64), None, "do not ascend"),
        (np.zeros((2, 2), np.int64), None, "d2t is int64"),
        (np.zeros(3, np.float32), None, "d2t is float32"),
    ],
)
def test_maps_from_elsewhere_are_proved(d2t: Any, t2d: Any, complaint: str | None) -> None:
    if complaint is None:
        assert DraftVocab.checked(d2t, t2d, 20, "x").target_ids.tolist() == [0, 4, 8, 12]
        return
    with pytest.raises(InputError, match=complaint):
        DraftVocab.checked(d2t, t2d, 20, "x")


def test_reserved_tokens_take_no_room() -> None:
    assert RESERVED.search("<|reserved_special_token_7|>")
    assert not RESERVED.search("<think>")


def test_special_tokens_of_the_demo_target() -> None:
    from hsdump.demo.run import TARGET

    assert special_tokens(TARGET) == {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hsdump.demo.run import TARGET

    store = make_store(tmp_path / "store", make_target(tmp_path / "target"))
    words = ["vocab", str(store), "--model", str(TARGET), "--json", "--held-out", "0.2"]
    assert main([*words, "--size", "50"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["size"] == 50
    assert first["always"] == ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    assert 0.9 < first["coverage_train"] <= 1.0
    assert load_vocab(default_vocab(store), VOCAB).digest == first["digest"]
    assert main([*words, "--from", str(default_vocab(store)), "--out", str(tmp_path / "again.safetensors")]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == first["digest"]
    assert main([*words, "--exact", "--out", str(tmp_path / "all.safetensors")]) == 0
    assert json.loads(capsys.readouterr().out)["size"] == VOCAB
    assert main([*words, "--exact", "--size", "3"]) == 64


@pytest.mark.skipif(CASES is None, reason="HSDUMP_REAL_CASES names no file of collected cases")
def test_collected_cases() -> None:
    assert CASES is not None
    cases = [json.loads(line) for line in Path(CASES).read_text(encoding="utf-8").splitlines()]
    inputs = {case["id"][:8]: case["input"] for case in cases if case["kind"] == "vocab"}
    few = inputs["vocab-01"]
    ids = [token for row in few["masked_token_ids"] for token in row]
    vocab = choose(counts_of(ids, few["target_vocab_size"]), few["draft_vocab_size"])
    assert vocab.size == few["draft_vocab_size"] == vocab.t2d.sum()
    assert set(ids) <= set(vocab.target_ids.tolist())
    for bad in inputs["vocab-02"]["cases"]:
        with pytest.raises(UsageError):
            choose(np.zeros(bad["target_vocab_size"], np.int64), bad["draft_vocab_size"])
    masked = inputs["vocab-03"]
    kept = [
        token
        for row in masked["rows"]
        for token, learned in zip(row["input_ids"], row["loss_mask"], strict=True)
        if learned
    ]
    chosen = choose(counts_of(kept, masked["target_vocab_size"]), masked["draft_vocab_size"])
    assert chosen.target_ids.tolist() == [8, 9]
