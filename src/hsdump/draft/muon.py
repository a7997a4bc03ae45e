"""Muon: every direction of a matrix's step is equally long.

torch's own (`torch.optim.Muon`, from 2.9) reckons the step in bfloat16 whatever the device. On a processor without
bfloat16 instructions that took longer than all the rest of a training step, so here a CPU reckons in float32.

Sources: Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/), for the iteration and its coefficients;
"Muon is Scalable for LLM Training" (arXiv 2502.16982), for steps of the size of AdamW's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPS = 1e-7
SIZE_OF_ADAMW = 0.2
"""Root mean square of AdamW's usual steps, in learning rates."""


class Muon(torch.optim.Optimizer):  # type: ignore[misc]  # torch is Any to mypy
    """Momentum, Nesterov's look ahead, and orthogonal steps; for matrices."""

    def __init__(self, weights: Iterable[Any], *, lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()  # type: ignore[untyped-decorator]  # as above
    def step(self) -> None:
        """Change every weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(weight))
                buffer.lerp_(weight.grad, 1 - group["momentum"])
                ahead = weight.grad.lerp(buffer, group["momentum"])
                step = orthogonal(ahead, torch.float32 if weight.device.type == "cpu" else torch.bfloat16)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(step, alpha=-group["lr"] * SIZE_OF_ADAMW * math.sqrt(max(weight.shape)))


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Bring all singular values near one, by Newton and Schulz's iteration.

    Args:
        dtype: what is reckoned in.

    Returns:
        A matrix of the same shape, in `dtype`; its singular values lie between about 0.7 and 1.2.
    """
    a, b, c = COEFFICIENTS
    wide = matrix.to(dtype, copy=True)
    tall = wide.shape[0] > wide.shape[1]
    if tall:
        wide = wide.T
    wide.div_(wide.norm().clamp(min=EPS))
    for _ in range(ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if tall else wide
