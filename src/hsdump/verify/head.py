"""From final states to log-probabilities, with the checkpoint's own norm and head.

Letters: R = rows, H = hidden size, V = vocabulary, B = rows of the head in memory at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsdump.arrays import StateArray, to_float32
from hsdump.errors import InputError
from hsdump.store.final_norm import FinalNorm
from hsdump.store.fp8 import from_float32
from hsdump.verify.checkpoint import EMBEDDING, FIX, HEAD, Checkpoint

ROWS_AT_ONCE = 4096
"""Rows that share one reading of the head."""


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """What a model does to its logits beside the matrix product."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: dict[str, Any]) -> HeadSettings:
        """Read them from a config: Cohere's and Granite's scale, MiniCPM's and Falcon-H1's factor, Gemma's cap."""
        scale = float(config.get("logit_scale") or 1.0) if config.get("model_type", "").startswith("cohere") else 1.0
        if config.get("logits_scaling"):
            scale /= float(config["logits_scaling"])
        if config.get("dim_model_base"):
            scale *= float(config["dim_model_base"]) / float(config["hidden_size"])
        if config.get("lm_head_multiplier"):
            scale *= float(config["lm_head_multiplier"])
        cap = config.get("final_logit_softcapping")
        return cls(scale=scale, softcap=float(cap) if cap else None)


@dataclass(frozen=True, slots=True, eq=False)
class RowLogprobs:
    """What the head says about rows."""

    target: NDArray[np.float64]
    """[R] log-probability of the given next token."""

    top_id: NDArray[np.int64]
    """[R] most probable token."""

    other: NDArray[np.float64]
    """[R] log-probability of a second given token."""


class Head:
    """A checkpoint's lm_head, or its embeddings where the two are tied."""

    def __init__(self, checkpoint: Checkpoint, vocab_size: int) -> None:
        """Find the tensors; nothing is read yet.

        Raises:
            InputError: the checkpoint has neither, or of another width.
        """
        tied = checkpoint.config.get("tie_word_embeddings")
        own = None if tied else checkpoint.find(HEAD)
        # A config that says nothing of it leaves it to its class; one that says no means that a head is missing here.
        name = own or (None if tied is False else checkpoint.find(EMBEDDING))
        if name is None or len(checkpoint.places[name].shape) != 2:
            which = "no lm_head, which its config says it has" if tied is False else "neither an lm_head nor embeddings"
            raise InputError(f"{checkpoint.folder} holds {which}", FIX)
        self.name, self._checkpoint, self._vocab_size = name, checkpoint, vocab_size
        self.settings = HeadSettings.of(checkpoint.config)
        self.width = checkpoint.places[name].shape[1]
        self._norm: FinalNorm | None = None

    def check_width(self, hidden_size: int) -> None:
        """Refuse states that this head cannot read.

        Raises:
            InputError: they are of another width.
        """
        if self.width != hidden_size:
            what = f"the head of {self._checkpoint.folder} reads states of width {self.width}, these are {hidden_size}"
            raise InputError(f"{what}: it is another model's checkpoint", FIX)

    def post_norm(self, state_RH: StateArray, dtype: str, final_state: str) -> StateArray:
        """Bring a final state to what the head reads: the checkpoint's norm, where it was stored before it.

        Raises:
            InputError: a norm that is not a plain RMSNorm.
        """
        if final_state != "pre_norm":
            return state_RH
        if self._norm is None:
            self._norm = FinalNorm.load(self._checkpoint.folder, self.width)
        return self._norm.apply(state_RH, dtype)

    def logprobs(
        self, state_RH: StateArray, dtype: str, target_ids: NDArray[np.int64], other_ids: NDArray[np.int64]
    ) -> RowLogprobs:
        """Compute log_softmax(head(state)) at given tokens, a block of the vocabulary at a time.

        Logits are rounded to the states' dtype as engines do, before they are scaled and capped in float32.

        Args:
            state_RH: post-norm states.
            target_ids: [R] the token that followed each row.
            other_ids: [R] another token to look at, such as the server's most probable one; -1 for none.
        """
        rows = len(state_RH)
        found = RowLogprobs(np.full(rows, np.nan), np.zeros(rows, np.int64), np.full(rows, np.nan))
        for start in range(0, rows, ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            with np.errstate(over="ignore", invalid="ignore"):  # states may hold infinities; what comes of them is nan
                self._some(to_float32(state_RH[part], dtype), dtype, target_ids[part], other_ids[part], found, start)
        return found

    def _some(
        self,
        wide_RH: NDArray[np.float32],
        dtype: str,
        target_ids: NDArray[np.int64],
        other_ids: NDArray[np.int64],
        found: RowLogprobs,
        start: int,
    ) -> None:
        rows = len(wide_RH)
        best, total = np.full(rows, -np.inf), np.zeros(rows)
        top_id, target, other = np.zeros(rows, np.int64), np.full(rows, np.nan), np.full(rows, np.nan)
        for first, block_BH in self._checkpoint.blocks(self.name, self._vocab_size):
            logits_RB = self._logits(wide_RH, block_BH, dtype)
            highest_at = logits_RB.argmax(axis=1)
            highest = logits_RB[np.arange(rows), highest_at].astype(np.float64)
            top_id = np.where(highest > best, highest_at + first, top_id)
            new_best = np.maximum(best, highest)
            sums = np.exp(logits_RB - new_best[:, None].astype(np.float32)).sum(axis=1, dtype=np.float64)
            total = total * np.exp(best - new_best) + sums
            best = new_best
            for ids, out in ((target_ids, target), (other_ids, other)):
                inside = np.flatnonzero((ids >= first) & (ids < first + len(block_BH)))
                out[inside] = logits_RB[inside, ids[inside] - first]
        norm = best + np.log(total)
        part = slice(start, start + rows)
        found.target[part], found.top_id[part], found.other[part] = target - norm, top_id, other - norm

    def _logits(self, wide_RH: NDArray[np.float32], block_BH: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = wide_RH @ block_BH.T
        if dtype != "float32":
            logits = to_float32(from_float32(logits, dtype), dtype)
        logits = logits * np.float32(self.settings.scale)
        if self.settings.softcap is not None:
            cap = np.float32(self.settings.softcap)
            logits = np.tanh(logits / cap) * cap
        return logits
