"""What training needs of the target: rows of its head and its embeddings, read lazily from the checkpoint.

Letters: V = target vocabulary, K = draft vocabulary, H = hidden size, T = tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hsdump.errors import InputError
from hsdump.verify.checkpoint import EMBEDDING, HEAD, Checkpoint

ROWS = 16_384
"""Rows of the head that are multiplied at a time when the whole vocabulary is asked."""


class Target:
    """A checkpoint's head and embeddings. Only what is asked for is read."""

    def __init__(self, folder: str | Path) -> None:
        """Raises:
        InputError: no checkpoint there, or one without embeddings.
        """
        self.checkpoint = Checkpoint(folder)
        embedding = self.checkpoint.find(EMBEDDING)
        if embedding is None:
            raise InputError(f"{folder} holds no token embeddings", "name the target's folder with --model")
        self._embedding = embedding
        head = self.checkpoint.find(HEAD)
        self.tied = head is None
        self._head = embedding if head is None else head

    @property
    def vocab_size(self) -> int:
        return int(self.checkpoint.config["vocab_size"])

    def head_rows(self, ids_K: NDArray[np.int64]) -> NDArray[np.float32]:
        """float32 [K, H] the rows of the head that these tokens have."""
        return self.checkpoint.rows(self._head, ids_K)

    def embeddings(self) -> NDArray[np.float32]:
        """float32 [V, H]"""
        return self.checkpoint.rows(self._embedding, np.arange(self.vocab_size, dtype=np.int64))

    def first_choices(self, final_TH: Tensor) -> Tensor:
        """int64 [T] the token that the target itself says next, of its whole vocabulary; a block of rows at a time."""
        best = torch.full((len(final_TH),), float("-inf"), device=final_TH.device)
        choice = torch.zeros(len(final_TH), dtype=torch.int64, device=final_TH.device)
        final = final_TH.float()
        for start in range(0, self.vocab_size, ROWS):
            ids = np.arange(start, min(start + ROWS, self.vocab_size), dtype=np.int64)
            rows: Any = torch.from_numpy(self.head_rows(ids)).to(final.device)
            top, place = (final @ rows.T).max(dim=-1)
            better = top > best  # the lower id wins a tie, as argmax has it
            best = torch.where(better, top, best)
            choice = torch.where(better, place + start, choice)
        return choice
