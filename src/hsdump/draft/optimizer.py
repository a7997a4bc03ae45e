"""What changes the weights: AdamW, or Muon for the matrices inside with AdamW for the head and the norms.

Muon makes every direction of a matrix's step equally long, which small models and few steps profit from most. Its steps
are scaled to the size of AdamW's, so one learning rate is for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hsdump.draft.muon import Muon

Kind = Literal["adamw", "muon"]

HEADS = ("lm_head.weight", "embed_tokens.weight")
"""Matrices whose rows are tokens: AdamW's, as is usual with Muon."""

ADAM, MUON = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
"""What each remembers of a weight."""


class Optimizer:
    """One or two of torch's optimizers with one schedule, and moments that a checkpoint holds by name."""

    def __init__(self, named: Sequence[tuple[str, Any]], kind: Kind, *, lr: float, weight_decay: float) -> None:
        inside = [(name, weight) for name, weight in named if kind == "muon" and _is_inside(name, weight)]
        names = {name for name, _ in inside}
        rest = [(name, weight) for name, weight in named if name not in names]
        self._fused = all(weight.is_cuda for _, weight in rest)  # one pass over the weights instead of a dozen
        adam = torch.optim.AdamW(
            [weight for _, weight in rest], lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay, fused=self._fused
        )
        self._parts: list[tuple[Any, list[tuple[str, Any]], tuple[str, ...]]] = [(adam, rest, ADAM)]
        if inside:
            matrices = [weight for _, weight in inside]
            muon = Muon(matrices, lr=lr, weight_decay=weight_decay)
            self._parts.append((muon, inside, MUON))

    def step(self, lr: float) -> None:
        """Change the weights with this learning rate, and forget the gradients."""
        for part, _, _ in self._parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()
            part.zero_grad(set_to_none=True)

    def moments(self, whole: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Give what a checkpoint needs, `whole` having joined the shards of each."""
        return {
            f"{name}.{moment}": whole(part.state[weight][moment])
            for part, named, moments in self._parts
            for name, weight in named
            for moment in moments
        }

    def restore(self, moments: dict[str, Tensor], step: int, put: Callable[[Tensor, Tensor], None]) -> None:
        """Go back to where a checkpoint was."""
        for part, named, kinds in self._parts:
            for name, weight in named:
                kept = {moment: torch.zeros_like(weight) for moment in kinds}
                for moment in kinds:
                    put(kept[moment], moments[f"{name}.{moment}"])
                place = weight.device if self._fused else "cpu"  # where torch looks for it
                part.state[weight] = (
                    kept if kinds is MUON else {"step": torch.tensor(float(step), device=place), **kept}
                )


def _is_inside(name: str, weight: Tensor) -> bool:
    return weight.ndim == 2 and name not in HEADS
