"""From a store to batches of a drafter: samples of one side of the split, aligned as the drafter reads them.

Letters: T = tokens of a batch, H = hidden size, L = auxiliary layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hsdump.draft.model import Inputs
from hsdump.draft.split import is_held_out
from hsdump.errors import InputError, UsageError
from hsdump.layers import FINAL, state_names
from hsdump.store import StoredSample
from hsdump.torch import HiddenStateDataset


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """What one step of training needs."""

    inputs: Inputs
    final: Tensor
    """[T, H] the final state of row t's own token: what the target made of it."""

    mask: Tensor
    """bool [T] rows whose next token a drafter is asked for: the row's token and the next one are the target's own."""

    next_ids: Tensor
    """int64 [T] the token that came after row t's, -1 at a document's end."""

    def tensors(self) -> list[Tensor]:
        """Give those that are on the device."""
        inputs = (self.inputs.input_ids, self.inputs.aux, self.inputs.position_ids, self.inputs.document_ids)
        return [*inputs, self.final, self.mask, self.next_ids]


class Side:
    """The samples on one side of the held-out split, as a data set of their own."""

    def __init__(self, dataset: HiddenStateDataset, held_out: float, *, apart: bool) -> None:
        """Args:
        held_out: share of the samples that training never sees.
        apart: those, instead of the others.
        """
        self.dataset = dataset
        self.store = dataset.store
        keys = dataset.store.keys()
        long_enough = (dataset.lengths >= 3).tolist()  # a token, its state, and one to guess
        self.positions = [
            place for place, key in enumerate(keys) if is_held_out(key, held_out) == apart and long_enough[place]
        ]
        self.lengths = dataset.lengths[self.positions]

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, place: int) -> StoredSample:
        return self.dataset[self.positions[place]]


def check_final(store_path: Path, final_state: str) -> None:
    """See that the store holds what the target's head reads.

    Raises:
        InputError: it holds the state before the final norm only.
    """
    if final_state == "pre_norm":
        raise InputError(
            f"{store_path} holds final states before the norm, which the target's head does not read",
            "capture with an engine that gives the state after it, or add it: hsdump store recode",
        )


def align(packed: dict[str, Any], layers: Sequence[int], device: torch.device) -> Batch:
    """Pair each token with the states of the one before it.

    The states of a sample's token t tell about token t+1, and the drafter reads both to guess t+2, for which the
    target's own guess is in the final state of t+1. Each document gives one row less than it has tokens.

    Args:
        packed: what `hsdump.torch.Packer` gives.
        layers: ids in hsdump's meaning.
    """
    documents = packed["document_ids"]
    same = documents[1:] == documents[:-1]
    rows = torch.nonzero(same)[:, 0]
    learned = packed["loss_mask"]
    ends = torch.cat([rows[1:] != rows[:-1] + 1, torch.ones(1, dtype=torch.bool)])  # the last row of a document
    after = (rows + 2).clamp_max(len(documents) - 1)
    states = {name: state.to(device, non_blocking=True) for name, state in packed["states"].items()}
    on_device = rows.to(device)
    next_ids = torch.where(ends, -1, packed["input_ids"][after])
    inputs = Inputs(
        input_ids=packed["input_ids"][rows + 1].to(device),
        aux=torch.cat([states[f"layer{layer}"] for layer in layers], dim=-1)[on_device],
        position_ids=packed["position_ids"][rows].to(device),
        document_ids=documents[rows].to(device),
        lengths=packed["lengths"] - 1,
    )
    return Batch(
        inputs=inputs,
        final=states[FINAL][on_device + 1],
        mask=(learned[rows + 1] & learned[after] & ~ends).to(device),
        next_ids=next_ids.to(device),
    )


def names_for(layers: Sequence[int], available: Sequence[str]) -> tuple[str, ...]:
    """Name the states that training reads.

    Raises:
        UsageError: the store lacks one.
    """
    wanted = state_names(layers)
    missing = [name for name in wanted if name not in available]
    if missing:
        what = f"the store has no states {', '.join(missing)}"
        raise UsageError(what, f"it has {', '.join(available)}: capture it again, or train on other layers")
    return wanted
