"""The loss through the drafter's head, with its gradient made in the same pass.

The logits are the largest tensors of a training by far. Autograd keeps them until the backward pass, or has them
computed a second time. Here a piece of them lives until its gradient has gone through the head, and all steps of the
training-time test share one gradient of the head.

Letters: S = steps, T = tokens, M = rows that are learned from, H = hidden size, K = draft vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hsdump.draft.loss import Loss, step_mask

LOG = logging.getLogger(__name__)

PIECE_BYTES = 1 << 29
"""Of a piece's logits in float32."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """What one step learns from: the drafter's guess of row `begins[i]` is about the target's row `about[i]`."""

    begins: Tensor
    """int64 [M'] into [T]; no row twice."""

    about: Tensor
    """int64 [M'] into [M]"""

    def pieces(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Give both, `size` rows at a time."""
        for start in range(0, len(self.begins), size):
            yield self.begins[start : start + size], self.about[start : start + size]


def rows_of_steps(mask_T: Tensor, documents_T: Tensor, steps: int) -> tuple[Tensor, list[Rows]]:
    """Give the rows [M] that are learned from, and which of them each step's guesses are about.

    Every count of rows is a wait for the GPU: all of them are here, before it has work to do.
    """
    place_T = mask_T.cumsum(0) - 1  # of a row that is learned from among all of them
    begun = [torch.nonzero(step_mask(mask_T, documents_T, step))[:, 0] for step in range(steps)]
    rows = [Rows(begins=begins, about=place_T[begins + step]) for step, begins in enumerate(begun)]
    return torch.nonzero(mask_T)[:, 0], rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Asked:
    """What is summed up over all steps."""

    loss: Loss
    rows: Sequence[Rows]
    """[S]"""

    scales: Tensor
    """[S] what each step's sum is multiplied by."""

    target: Tensor
    """[M, K] the target's logits."""


def head_loss(asked: Asked, weight_KH: Tensor, normed_STH: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Sum all steps' losses.

    Args:
        weight_KH: the drafter's head.
        normed_STH: of each step, what the head reads.

    Returns:
        A scalar, and float32 [S, 2] without gradient: each step's loss without its scale, and its right guesses. A
        guess is right here when it is the target's first choice within the draft vocabulary.
    """
    total, sums = _HeadLoss.apply(asked, torch.is_grad_enabled(), weight_KH, *normed_STH)
    return total, sums


class _HeadLoss(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to mypy
    @staticmethod
    def forward(ctx: Any, asked: Asked, learns: bool, weight_KH: Tensor, *normed_STH: Tensor) -> tuple[Tensor, Tensor]:
        on = weight_KH.device.type
        head_KH = weight_KH.to(torch.get_autocast_dtype(on) if torch.is_autocast_enabled(on) else weight_KH.dtype)
        made = [torch.zeros_like(one) for one in (weight_KH, *normed_STH)] if learns else []
        sums = torch.zeros(len(asked.rows), 2, device=weight_KH.device)
        first_choice_M = asked.target.argmax(-1)
        for step, (normed_TH, rows) in enumerate(zip(normed_STH, asked.rows, strict=True)):
            for begins, about in rows.pieces(max(PIECE_BYTES // (4 * len(weight_KH)), 1)):
                read_MH, target_MK = normed_TH[begins].to(head_KH.dtype), asked.target[about]
                logits_MK = read_MH @ head_KH.T
                sums[step, 1] += (logits_MK.argmax(-1) == first_choice_M[about]).sum()
                if not learns:
                    sums[step, 0] += asked.loss(logits_MK, target_MK).sum()
                    continue
                lost, gradient_MK = _with_gradient(asked.loss, logits_MK, target_MK, asked.scales[step])
                sums[step, 0] += lost
                made[0] += gradient_MK.T @ read_MH
                made[1 + step][begins] = (gradient_MK @ head_KH).to(normed_TH.dtype)
        ctx.save_for_backward(*made)
        ctx.mark_non_differentiable(sums)
        return (asked.scales * sums[:, 0]).sum(), sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _sums: Tensor) -> tuple[Tensor | None, ...]:
        # The factor stays as exact as it came: it is the same one for the head and for what is below it.
        made = [(gradient * one.float()).to(one.dtype) for one in ctx.saved_tensors]
        return (None, None, *made)


def _with_gradient(loss: Loss, logits_MK: Tensor, target_MK: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Give the summed loss, and the gradient of it times its scale, with respect to the logits.

    A loss of a dozen passes over the logits is one of two or three where it is compiled, as flex attention is.
    """
    if not _compiles(logits_MK) or loss in _REFUSED:
        return _differentiate(loss, logits_MK, target_MK, scale)
    if loss not in _COMPILED:
        _COMPILED[loss] = torch.compile(loss, dynamic=True)
    try:
        return _differentiate(_COMPILED[loss], logits_MK, target_MK, scale)
    except DEVICE_ERRORS:
        raise
    except RuntimeError as error:  # all of the compiler's are
        what = (str(error).splitlines() or ["without a word"])[0]
        LOG.warning("the loss does not compile here and takes longer: %s: %s", type(error).__name__, what)
        _REFUSED.add(loss)
        return _differentiate(loss, logits_MK, target_MK, scale)


def _compiles(logits_MK: Tensor) -> bool:
    """Whether compiling is worth its seconds."""
    return bool(logits_MK.is_cuda)


def _differentiate(loss: Loss, logits_MK: Tensor, target_MK: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        logits_MK = logits_MK.detach().requires_grad_()
        lost = loss(logits_MK, target_MK).sum()
        (gradient_MK,) = torch.autograd.grad(lost * scale, logits_MK)
    return lost.detach(), gradient_MK


DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)
"""What no other way to compute the loss would mend."""

_COMPILED: dict[Loss, Loss] = {}
_REFUSED: set[Loss] = set()
"""Losses that the compiler did not take in this process."""
