"""Losses of one step, and whether its guess was right.

Letters: T = tokens, K = draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EPS = 1e-5
"""Keeps an empty step finite, and the logarithm of an overlap too."""


def kl(logits_TK: Tensor, target_TK: Tensor) -> Tensor:
    """[T] forward KL from the target's distribution over the draft vocabulary."""
    log_q = torch.log_softmax(logits_TK.float(), dim=-1)
    log_p = torch.log_softmax(target_TK.float(), dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def hard(logits_TK: Tensor, target_TK: Tensor) -> Tensor:
    """[T] cross entropy with the target's first choice."""
    return torch.nn.functional.cross_entropy(logits_TK.float(), target_TK.argmax(-1), reduction="none")


def overlap(logits_TK: Tensor, target_TK: Tensor) -> Tensor:
    """[T] sum of min(p, q): how often rejection sampling takes this guess."""
    return torch.minimum(torch.softmax(logits_TK.float(), -1), torch.softmax(target_TK.float(), -1)).sum(-1)


def lk(logits_TK: Tensor, target_TK: Tensor) -> Tensor:
    """[T] negative logarithm of the acceptance rate: cross entropy where the target is certain."""
    return -torch.log(overlap(logits_TK, target_TK).clamp_min(EPS))


def tv(logits_TK: Tensor, target_TK: Tensor) -> Tensor:
    """[T] total variation distance, one minus the acceptance rate."""
    return 1.0 - overlap(logits_TK, target_TK)


Loss = Callable[[Tensor, Tensor], Tensor]

LOSSES: dict[str, Loss] = {"kl": kl, "hard": hard, "lk": lk, "tv": tv}


def step_mask(mask_T: Tensor, document_ids_T: Tensor, step: int) -> Tensor:
    """[T] bool: rows whose token k places further is one to learn, and of the same document.

    Args:
        mask_T: rows whose own next token is one to learn.
    """
    if step == 0:
        return mask_T
    shifted = torch.zeros_like(mask_T)
    shifted[:-step] = mask_T[step:] & (document_ids_T[step:] == document_ids_T[:-step])
    return shifted


def shift(rows: Tensor, step: int) -> Tensor:
    """Move rows `step` places up; the last ones are zeros, which `step_mask` leaves out."""
    if step == 0:
        return rows
    return torch.cat([rows[step:], rows.new_zeros((step, *rows.shape[1:]))])
