"""How many drafted tokens a target would take, reckoned from stored states: every position at once.

The number that serving shows is counted differently: drafts begin only where the last one ended. `hsdump eval` with
`--prompts` walks that way; this is the cheap one, for validation.

Letters: T = tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hsdump.draft.data import Batch
from hsdump.draft.loss import shift, step_mask
from hsdump.draft.model import Drafter
from hsdump.draft.unrolled import make_causal


@dataclass(slots=True)
class Acceptance:
    """Counts of drafts by how far they went."""

    starts: list[int] = field(default_factory=list)
    """[steps] drafts that had a token to guess at this place, all guesses before it right."""

    right: list[int] = field(default_factory=list)
    """[steps] of these, how many guessed it."""

    def add(self, starts: Sequence[int], right: Sequence[int]) -> None:
        """Count more drafts."""
        if not self.starts:
            self.starts, self.right = [0] * len(starts), [0] * len(starts)
        for step, (more, hit) in enumerate(zip(starts, right, strict=True)):
            self.starts[step] += int(more)
            self.right[step] += int(hit)

    @property
    def conditional(self) -> list[float]:
        """[steps] share of right guesses, given that all before were right."""
        return [hit / max(start, 1) for hit, start in zip(self.right, self.starts, strict=True)]

    @property
    def per_position(self) -> list[float]:
        """[steps] share of drafts whose token at this place is taken."""
        rates, so_far = [], 1.0
        for rate in self.conditional:
            so_far *= rate
            rates.append(so_far)
        return rates

    def length(self, tokens: int | None = None) -> float:
        """Tokens a target's forward gives, the bonus token counted, with this many draft tokens."""
        return 1.0 + sum(self.per_position[:tokens])


def first_choices(batches: Iterable[Batch], choose: object) -> list[Tensor]:
    """Ask the target's whole head once for each batch, so that validation need not again."""
    assert callable(choose)
    return [choose(batch.final).cpu() for batch in batches]


def measure(drafter: Drafter, batch: Batch, truth_T: Tensor, steps: int, attention: str) -> tuple[list[int], list[int]]:
    """Count one batch's drafts: starts and right guesses of each step.

    Args:
        truth_T: int64 [T] the target's own first choice behind each row's token, as target ids.
    """
    starts, right = [], []
    causal = make_causal(batch.inputs, attention)
    alive = batch.mask.clone()
    # Not inference_mode on a GPU: compiled attention is called with gradients as well, and tensors of the one kind may
    # not meet code that was compiled for the other.
    with torch.no_grad() if batch.final.is_cuda else torch.inference_mode():
        for step, normed in enumerate(drafter.unroll(batch.inputs, steps, causal)):
            asked = alive & step_mask(batch.mask, batch.inputs.document_ids, step)
            guess = drafter.target_ids(drafter.lm_head(normed).argmax(-1))
            hit = asked & (guess == shift(truth_T.to(guess.device), step))
            starts.append(int(asked.sum()))
            right.append(int(hit.sum()))
            # A right guess is fed on only where the text went on with it, which it does in answers of the target.
            alive = hit & (shift(batch.next_ids, step) == guess)
    return starts, right
