"""Which samples go into which batch: as many tokens as fit, every sample once an epoch, the same on every machine.

No padding and no dropped tail: short samples are packed together up to the budget, and the last batch of an epoch is
as good as any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsdump.errors import UsageError

OPEN_BATCHES = 64
"""Batches that a sample is tried in before a new one is begun. More fill better and mix less."""


class TokenBudgetSampler:
    """A batch sampler, as `torch.utils.data.DataLoader` takes it: lists of positions in the data set.

    The batches of an epoch follow from seed and epoch alone; each rank takes every `world_size`-th. All ranks get the
    same number of batches, because a rank that ends earlier leaves the others waiting for ever: batches are divided
    until the number is even, and only when there are fewer samples than that takes are some repeated (`repeated`).

    Iterating goes on where the last iteration stopped (`load_state_dict`), then to the next epoch.
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[np.int64],
        *,
        tokens: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        skip_longer: bool = False,
    ) -> None:
        """Args:
        lengths: tokens of each sample.
        tokens: most tokens of a batch.
        skip_longer: leave out samples that are longer than a batch (`skipped` counts them) instead of refusing.

        Raises:
            UsageError: a sample is longer than a batch, there is none, or the rank does not exist.
        """
        self._lengths = np.asarray(lengths, dtype=np.int64)
        longer = self._lengths > tokens
        self.skipped = int(longer.sum())
        if self.skipped and not skip_longer:
            what = (
                f"{self.skipped} samples are longer than a batch of {tokens} tokens, the longest {self._lengths.max()}"
            )
            raise UsageError(what, "raise tokens, or leave them out with skip_longer=True")
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} of {world_size}", "ranks are counted from 0")
        self._usable = np.flatnonzero(~longer)
        if not len(self._usable):
            raise UsageError("there is no sample to train on", "capture some, or raise tokens")
        self._tokens, self._seed, self._rank, self._world_size = tokens, seed, rank, world_size
        self.epoch, self.step = 0, 0
        self.repeated = 0
        """Samples of the current epoch that come twice, over all ranks."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = self.batches(self.epoch)
        for batch in batches[self.step :]:
            self.step += 1
            yield batch
        self.set_epoch(self.epoch + 1)

    def __len__(self) -> int:
        return len(self.batches(self.epoch)) - self.step

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch from its first batch."""
        self.epoch, self.step = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Give what a checkpoint must keep. With loader workers, which fetch ahead, count the steps done yourself."""
        return {"epoch": self.epoch, "step": self.step, "seed": self._seed, "tokens": self._tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the batch at which `state_dict` was taken.

        Raises:
            UsageError: it was taken with another seed or budget, so that its step means other batches.
        """
        here = {"seed": self._seed, "tokens": self._tokens}
        other = {name: state.get(name) for name in here if state.get(name) != here[name]}
        if other:
            raise UsageError(f"the checkpoint's batches were made with {other}, these with {here}", "use the same")
        self.epoch, self.step = int(state["epoch"]), int(state["step"])

    def batches(self, epoch: int) -> list[list[int]]:
        """Give this rank's batches of an epoch."""
        everybodys = self._even(self._pack(epoch))
        return everybodys[self._rank :: self._world_size]

    def _pack(self, epoch: int) -> list[list[int]]:
        """Put samples, in random order, into the fullest open batch that takes them."""
        random = np.random.default_rng([self._seed, epoch])
        done: list[list[int]] = []
        still_open: list[tuple[int, list[int]]] = []
        for position in random.permutation(self._usable).tolist():
            length = int(self._lengths[position])
            fitting = [entry for entry in still_open if entry[0] >= length]
            room, batch = min(fitting, key=_room) if fitting else (self._tokens, [])
            if fitting:
                still_open.remove((room, batch))
            batch.append(position)
            still_open.append((room - length, batch))
            if len(still_open) > OPEN_BATCHES:
                fullest = min(still_open, key=_room)
                still_open.remove(fullest)
                done.append(fullest[1])
        done += [batch for _, batch in still_open]
        # Batches are closed fullest first, so their order is mixed again.
        return [done[place] for place in random.permutation(len(done)).tolist()]

    def _even(self, batches: list[list[int]]) -> list[list[int]]:
        """Bring the number of batches to a multiple of the world size."""
        batches = list(batches)
        self.repeated = 0
        missing = -len(batches) % self._world_size
        for _ in range(missing):
            place = max(range(len(batches)), key=lambda number: len(batches[number]))
            largest = batches[place]
            if len(largest) > 1:
                batches[place] = largest[: len(largest) // 2]
                batches.append(largest[len(largest) // 2 :])
            else:
                again = batches[len(batches) % self._world_size % len(batches)]
                batches.append(list(again))
                self.repeated += len(again)
        return batches


def _room(entry: tuple[int, list[int]]) -> int:
    return entry[0]
