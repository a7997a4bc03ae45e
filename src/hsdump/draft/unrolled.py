"""The loss of a batch over all steps of the training-time test, as one module: what DDP and FSDP wrap.

Letters: S = steps, T = tokens, M = rows that are learned from, H = hidden size, K = draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hsdump.draft.attention import ByDocument, Causal, Flex
from hsdump.draft.data import Batch
from hsdump.draft.head_loss import Asked, head_loss, rows_of_steps
from hsdump.draft.loss import EPS, LOSSES, step_mask
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
            A scalar, and float32 [steps, 2] without gradient, as `head_loss` does.
        """
        # Only rows that are learned from meet the head: prompts are half of many stores, and logits cost the most.
        rows_M, rows = rows_of_steps(batch.mask, batch.inputs.document_ids, self.steps)
        with torch.no_grad():
            target_MK = batch.final[rows_M].to(self.head.dtype) @ self.head.T
        normed_STH = list(self.drafter.unroll(batch.inputs, self.steps, causal))
        decays_S = self.decay ** torch.arange(self.steps, device=counts.device)
        asked = Asked(loss=self.loss, rows=rows, scales=decays_S / (counts + EPS), target=target_MK)
        return head_loss(asked, self.drafter.lm_head.weight, normed_STH)


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
