"""Samples as tensors, one at a time or packed into a batch without padding.

Letters: S = tokens of one sample, T = tokens of a batch, H = hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from hsdump.errors import UsageError
from hsdump.store import Store, StoredSample
from hsdump.torch.batches import TokenBudgetSampler

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class HiddenStateDataset:
    """The samples of a store, by position. Items are views of the page cache; `Packer` copies them once, into a batch.

    Sent to worker processes it opens the store there anew.
    """

    def __init__(self, path: str | os.PathLike[str], *, check: bool = False) -> None:
        """Args:
        check: prove checksums at every access.

        Raises:
            StoreError, StoreCorrupt: as `Store`.
        """
        self.store = Store(Path(path), check=check)
        self.lengths: NDArray[np.int64] = self.store.lengths()
        """[len(self)] tokens of each sample."""

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, position: int) -> StoredSample:
        return self.store[position]


class Packer:
    """A `collate_fn`: samples one after another in one row of tokens, told apart by `document_ids`."""

    def __init__(self, dtype: str, states: Sequence[str]) -> None:
        """Args:
        dtype: of the store's states.
        states: names of those that a batch shall hold.
        """
        self._dtype, self._states = dtype, tuple(states)

    def __call__(self, samples: Sequence[StoredSample]) -> dict[str, Any]:
        """Copy samples into a batch.

        Returns:
            `input_ids` int64 [T], `loss_mask` bool [T], `position_ids` int64 [T] (0 at each sample's beginning),
            `document_ids` int64 [T] (0, 1, ... as samples follow each other), `lengths` int64 [samples],
            `states` name to [T, H] in the model's dtype, `keys` of the samples.
        """
        lengths = np.asarray([sample.num_tokens for sample in samples], dtype=np.int64)
        return {
            "input_ids": torch.from_numpy(np.concatenate([sample.input_ids for sample in samples])),
            "loss_mask": torch.from_numpy(np.concatenate([sample.loss_mask for sample in samples]).astype(np.bool_)),
            "position_ids": torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
            "document_ids": torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
            "lengths": torch.from_numpy(lengths),
            "states": {name: self._packed(name, samples) for name in self._states},
            "keys": [sample.key for sample in samples],
        }

    def _packed(self, name: str, samples: Sequence[StoredSample]) -> torch.Tensor:
        rows = torch.from_numpy(np.concatenate([sample.states[name] for sample in samples]))
        return rows.view(TORCH_DTYPES[self._dtype])


def make_loader(
    dataset: HiddenStateDataset,
    sampler: TokenBudgetSampler,
    *,
    states: Sequence[str] | None = None,
    workers: int = 2,
    pin_memory: bool = False,
    prefetch: int = 2,
) -> DataLoader[Any]:
    """Load packed batches ahead of their use.

    Args:
        states: which states a batch holds; None for all.
        workers: processes that read and decode; 0 reads in this one.
        pin_memory: copy batches to page-locked memory, from which a GPU fetches without waiting.
        prefetch: batches that each worker is ahead.

    Raises:
        UsageError: a state that the store does not hold.
    """
    shape = dataset.store.manifest.shape
    unknown = [name for name in states or () if name not in shape.names]
    if unknown:
        raise UsageError(f"the store has no states {', '.join(unknown)}", f"choose of {', '.join(shape.names)}")
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=Packer(shape.dtype, states or shape.names),
        num_workers=workers,
        pin_memory=pin_memory,
        prefetch_factor=prefetch if workers else None,
        # A forked child of a process with threads may hang; this one starts clean and costs a second once.
        multiprocessing_context="forkserver" if workers else None,
        persistent_workers=bool(workers),
    )
