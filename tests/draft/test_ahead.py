"""Batches one ahead: in order, no more than one, errors where they are asked for, no thread left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from hsdump.draft.ahead import Ahead
from hsdump.draft.checkpoints import load_drafter
from hsdump.draft.train import train
from tests.draft.making import SMALL, sources_in

CPU = torch.device("cpu")


def nothing(_number: int) -> list[Tensor]:
    return []


def test_it_is_one_ahead_and_ends_with_its_source() -> None:
    made = list[int]()

    def source() -> Iterator[int]:
        for number in range(6):
            made.append(number)
            yield number

    ahead = Ahead(source(), CPU, nothing)
    assert next(ahead) == 0
    time.sleep(0.2)
    assert made == [0, 1]
    assert list(ahead) == [1, 2, 3, 4, 5]
    assert list(ahead) == []
    ahead.close()


def test_an_error_comes_where_its_piece_is_asked_for() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise ValueError("damaged")

    ahead = Ahead(source(), CPU, nothing)
    assert next(ahead) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="damaged"):
            next(ahead)
    ahead.close()


def test_closing_leaves_an_endless_source_at_rest() -> None:
    made = 0

    def source() -> Iterator[int]:
        nonlocal made
        while True:
            made += 1
            yield made

    ahead = Ahead(source(), CPU, nothing)
    assert next(ahead) == 1
    ahead.close()
    seen = made
    time.sleep(0.1)
    assert made == seen


def test_training_is_the_same_with_and_without_workers(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    found = []
    for workers in (0, 1):
        sources = sources_in(tmp_path / str(workers))
        train(sources, msgspec.structs.replace(SMALL, workers=workers), quiet=True)
        found.append(load_drafter(sources.out)[0].state_dict())
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
