"""The loss of a batch over all steps of the training-time test, as one module: what DDP and FSDP wrap.

Letters: T = tokens, H = hidden size, K = draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hsdump.draft.attention import ByDocument, Causal, Flex
from hsdump.draft.data import Batch
from hsdump.draft.loss import LOSSES, shift, step_mask
from hsdump.draft.model import Drafter, Inputs


class Unrolled(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """A drafter, the target's head for its vocabulary, and a loss."""

    head: Tensor
    """[K, H] the target's rows of the draft vocabulary."""

    def __init__(self, drafter: Drafter, head_KH: Tensor, *, steps: int, decay: float, loss: str) -> None:
        super().__init__()
        self.drafter = drafter
        self.register_buffer("head", head_KH, persistent=False)
        self.steps, self.decay, self.loss = steps, decay, LOSSES[loss]

    def forward(self, batch: Batch, causal: Causal, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Give the loss, and of each step its weightless loss and right guesses, summed.

        Args:
            counts: [steps] rows that each step's mean is over (all ranks' mean, under DDP).

        Returns:
            A scalar, and float32 [steps, 2] without gradient. A guess is right here when it is the target's first
            choice within the draft vocabulary.
        """
        with torch.no_grad():
            target_TK = batch.final.to(self.head.dtype) @ self.head.T
        total = torch.zeros((), device=target_TK.device)
        sums = []
        for step, normed_TH in enumerate(self.drafter.unroll(batch.inputs, self.steps, causal)):
            args = (normed_TH, shift(target_TK, step), step_mask(batch.mask, batch.inputs.document_ids, step))
            if normed_TH.is_cuda and torch.is_grad_enabled():
                # The logits are the largest tensors by far; computing them twice keeps one step's at a time.
                lost, right = checkpoint(self._step, *args, use_reentrant=False)
            else:
                lost, right = self._step(*args)
            total = total + self.decay**step * lost / (counts[step] + 1e-5)
            sums.append(torch.stack([lost.detach(), right]))
        return total, torch.stack(sums)

    def _step(self, normed_TH: Tensor, target_TK: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
        logits_TK = self.drafter.lm_head(normed_TH)
        each = self.loss(logits_TK, target_TK)
        right = ((logits_TK.argmax(-1) == target_TK.argmax(-1)) & mask_T).sum().float()
        return torch.where(mask_T, each, torch.zeros_like(each)).sum(), right.detach()


def make_causal(inputs: Inputs, kind: str) -> Causal:
    """Choose the attention: `dense`, `flex`, or `auto` for what the device is better at."""
    on_gpu = bool(inputs.input_ids.is_cuda)
    if kind == "flex" or (kind == "auto" and on_gpu):
        return Flex(inputs.document_ids)
    return ByDocument(inputs.lengths.tolist())


def step_counts(batch: Batch, steps: int) -> Tensor:
    """[steps] rows that each step learns from."""
    counts: Any = [step_mask(batch.mask, batch.inputs.document_ids, step).sum() for step in range(steps)]
    return torch.stack(counts).float()
