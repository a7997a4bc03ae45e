"""The loss of a batch over all steps of the training-time test, as one module: what DDP and FSDP wrap.

Letters: T = tokens, M = rows that are learned from, H = hidden size, K = draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hsdump.draft.attention import ByDocument, Causal, Flex
from hsdump.draft.data import Batch
from hsdump.draft.loss import LOSSES, step_mask
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
        # Only rows that are learned from meet the head: prompts are half of many stores, and logits cost the most.
        rows_M, documents_T = torch.nonzero(batch.mask)[:, 0], batch.inputs.document_ids
        with torch.no_grad():
            target_MK = batch.final[rows_M].to(self.head.dtype) @ self.head.T
        total = torch.zeros((), device=target_MK.device)
        sums = []
        for step, normed_TH in enumerate(self.drafter.unroll(batch.inputs, self.steps, causal)):
            from_M = rows_M - step  # where the draft began whose guess at this step is the row's
            inside = (from_M >= 0) & (documents_T[from_M.clamp_min(0)] == documents_T[rows_M])
            args = (normed_TH[from_M[inside]], target_MK if step == 0 else target_MK[inside])
            if normed_TH.is_cuda and torch.is_grad_enabled():
                # The logits are the largest tensors by far; computing them twice keeps one step's at a time.
                lost, right = checkpoint(self._step, *args, use_reentrant=False)
            else:
                lost, right = self._step(*args)
            total = total + self.decay**step * lost / (counts[step] + 1e-5)
            sums.append(torch.stack([lost.detach(), right]))
        return total, torch.stack(sums)

    def _step(self, normed_MH: Tensor, target_MK: Tensor) -> tuple[Tensor, Tensor]:
        logits_MK = self.drafter.lm_head(normed_MH)
        right = (logits_MK.argmax(-1) == target_MK.argmax(-1)).sum().float()
        return self.loss(logits_MK, target_MK).sum(), right.detach()


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
