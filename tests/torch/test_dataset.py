"""Reading for training: every sample once, whole, at its own length; the same batches wherever they are asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsdump.errors import UsageError
from hsdump.torch import HiddenStateDataset, TokenBudgetSampler, make_loader
from tests.store.making import Made, fill, make_manifest


def flat(batches: list[list[int]]) -> list[int]:
    return [position for batch in batches for position in batch]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    world_size=st.integers(1, 5),
    seed=st.integers(0, 3),
)
def test_every_sample_once_an_epoch_within_the_budget(lengths: list[int], world_size: int, seed: int) -> None:
    ranks = [
        TokenBudgetSampler(lengths, tokens=50, seed=seed, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    parts = [rank.batches(0) for rank in ranks]
    assert len({len(part) for part in parts}) == 1  # no rank waits for another
    everything = flat([batch for part in parts for batch in part])
    assert set(everything) == set(range(len(lengths)))
    assert len(everything) - len(lengths) == ranks[0].repeated
    if len(lengths) >= world_size * 2:
        assert ranks[0].repeated == 0 or max(lengths) * 2 > 50
    assert all(batch and sum(lengths[position] for position in batch) <= 50 for part in parts for batch in part)


def test_batches_are_well_filled() -> None:
    """The length distribution of chats is wide; packing must not waste what padding would."""
    lengths = np.random.default_rng(0).lognormal(6, 1, 5000).astype(np.int64).clip(1, 4096)
    batches = TokenBudgetSampler(lengths, tokens=4096, seed=0).batches(0)
    assert lengths.sum() / (4096 * len(batches)) > 0.95


def test_epochs_differ_and_seeds_repeat() -> None:
    lengths = list(range(1, 40))
    one, other = (TokenBudgetSampler(lengths, tokens=64, seed=5) for _ in range(2))
    first = list(one)
    assert first == list(other)
    assert one.epoch == 1
    assert list(one) != first
    one.set_epoch(0)
    assert list(one) == first
    assert TokenBudgetSampler(lengths, tokens=64, seed=6).batches(0) != first


def test_a_run_goes_on_behind_its_checkpoint() -> None:
    lengths = list(range(1, 40))
    whole = TokenBudgetSampler(lengths, tokens=64, seed=5, rank=1, world_size=2)
    expected = [*whole, *whole]
    begun = TokenBudgetSampler(lengths, tokens=64, seed=5, rank=1, world_size=2)
    iterator = iter(begun)
    done = [next(iterator) for _ in range(3)]
    state = begun.state_dict()
    again = TokenBudgetSampler(lengths, tokens=64, seed=5, rank=1, world_size=2)
    again.load_state_dict(state)
    assert len(again) == len(whole.batches(0)) - 3
    assert [*done, *again, *again] == expected
    with pytest.raises(UsageError, match=r"the checkpoint's batches were made with \{'seed': 5\}, these with"):
        TokenBudgetSampler(lengths, tokens=64, seed=6).load_state_dict(state)


def test_what_the_sampler_refuses() -> None:
    with pytest.raises(UsageError, match="2 samples are longer than a batch of 10 tokens, the longest 12"):
        TokenBudgetSampler([5, 11, 12], tokens=10)
    sampler = TokenBudgetSampler([5, 11, 12], tokens=10, skip_longer=True)
    assert (sampler.skipped, flat(list(sampler))) == (2, [0])
    with pytest.raises(UsageError, match="there is no sample to train on"):
        TokenBudgetSampler([11], tokens=10, skip_longer=True)
    with pytest.raises(UsageError, match="rank 2 of 2"):
        TokenBudgetSampler([1], tokens=10, rank=2, world_size=2)


@pytest.mark.parametrize(("workers", "codec"), [(0, "raw"), (0, "fp8"), (2, "raw")])
def test_packed_batches_hold_each_sample_as_it_was_stored(tmp_path: Path, workers: int, codec: str) -> None:
    made = {one.sample.key: one for one in fill(tmp_path / "store", range(20), make_manifest(codec=codec))}
    dataset = HiddenStateDataset(tmp_path / "store", check=True)
    sampler = TokenBudgetSampler(dataset.lengths, tokens=100)
    seen: list[str] = []
    for batch in make_loader(dataset, sampler, workers=workers):
        assert len(batch["input_ids"]) <= 100
        seen += batch["keys"]
        ends = batch["lengths"].cumsum(0)
        for number, (key, end, length) in enumerate(zip(batch["keys"], ends, batch["lengths"], strict=True)):
            rows = slice(int(end - length), int(end))
            assert (batch["document_ids"][rows] == number).all()
            assert batch["position_ids"][rows].tolist() == list(range(length))
            assert_is(made[key], {name: batch[name][rows] for name in ("input_ids", "loss_mask")})
            for state, expected in zip(batch["states"].values(), made[key].states, strict=True):
                assert state.dtype == torch.bfloat16
                wide = torch.from_numpy(expected.copy()).view(torch.bfloat16).float()
                # fp8 keeps 3 mantissa bits: half a step is 1/16 of the value, or of the smallest normal code's.
                loose = {"rtol": 1 / 16 * 1.01, "atol": 2e-3} if codec == "fp8" else {"rtol": 0, "atol": 0}
                torch.testing.assert_close(state[rows].float(), wide, **loose)
    assert sorted(seen) == sorted(made)


def assert_is(one: Made, found: dict[str, torch.Tensor]) -> None:
    assert found["input_ids"].tolist() == one.sample.input_ids.tolist()
    assert found["loss_mask"].tolist() == one.sample.loss_mask.astype(bool).tolist()


def test_some_states_only(tmp_path: Path) -> None:
    fill(tmp_path / "store", range(3))
    dataset = HiddenStateDataset(tmp_path / "store")
    sampler = TokenBudgetSampler(dataset.lengths, tokens=1000)
    (batch,) = make_loader(dataset, sampler, states=["final"], workers=0)
    assert list(batch["states"]) == ["final"]
    with pytest.raises(UsageError, match="the store has no states layer9\n  fix: choose of layer2, layer4, final"):
        make_loader(dataset, sampler, states=["layer9"], workers=0)
