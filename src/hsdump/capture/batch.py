"""What one forward pass computed, in terms that no engine owns.

Letters: T = rows of the batch, L = auxiliary layers, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hsdump.spool.names import Rid


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of a batch that belong to one request."""

    rid: Rid
    first_row: int
    """In the batch."""

    position: int
    """In the request: the number of tokens before these rows (`prefix_len`)."""

    num_rows: int

    decode: bool = False
    """Computed by a decode step, not by prefill."""


def segments_of(rids: Sequence[str], prefix_lens: Sequence[int], extend_lens: Sequence[int]) -> list[Segment]:
    """Find hsdump's rows in a batch; rows of other requests are skipped over."""
    segments, row = [], 0
    for text, prefix_len, extend_len in zip(rids, prefix_lens, extend_lens, strict=True):
        rid = Rid.parse(text) if text.startswith("hsdump-") else None
        if rid is not None and extend_len > 0:
            segments.append(Segment(rid, row, prefix_len, extend_len))
        row += extend_len
    return segments


def decode_segments(rids: Sequence[str], seq_lens: Sequence[int]) -> list[Segment]:
    """Find hsdump's rows in a decode batch, one row a request.

    Args:
        seq_lens: tokens of each request, the one that this step feeds included.

    Returns:
        Rows that are wanted. Overlapped scheduling runs one step too many; that row is left out.
    """
    segments = []
    for row, (text, seq_len) in enumerate(zip(rids, seq_lens, strict=True)):
        rid = Rid.parse(text) if text.startswith("hsdump-") else None
        if rid is not None and rid.prompt_tokens is not None and rid.prompt_tokens < seq_len <= rid.num_tokens:
            segments.append(Segment(rid, row, seq_len - 1, 1, decode=True))
    return segments


def split_late(segments: Sequence[Segment]) -> tuple[list[Segment], list[Segment]]:
    """Part prefill segments into sound ones and those whose generated tokens are computed again by prefill, after a
    retraction: such rows are not what a decode step gives.
    """
    late = [
        segment
        for segment in segments
        if segment.rid.prompt_tokens is not None and segment.position + segment.num_rows > segment.rid.prompt_tokens
    ]
    return [segment for segment in segments if segment not in late], late


@dataclass(frozen=True, slots=True)
class BatchStates:
    """The tensors of one pass, rows beyond the real ones (padding of a graph) included."""

    token_ids: torch.Tensor
    """[T] int"""

    aux: torch.Tensor | Sequence[torch.Tensor]
    """[T, L*H] packed, or L tensors [T, H], layers ascending."""

    final: torch.Tensor
    """[T, H]"""

    def columns(self, num_layers: int, hidden_size: int, num_rows: int = 0) -> list[torch.Tensor]:
        """Give the L+1 states as [T, H] views, the final one last.

        Args:
            num_rows: rows that will be read; padding beyond them is fine, fewer is not.

        Raises:
            ValueError: widths that do not fit L and H, which would mean other layers than announced, or too few rows.
        """
        if isinstance(self.aux, torch.Tensor):
            if self.aux.shape[-1] != num_layers * hidden_size:
                raise ValueError(f"aux is {tuple(self.aux.shape)}, expected {num_layers} x {hidden_size} columns")
            aux = list(self.aux.split(hidden_size, dim=-1))
        else:
            aux = list(self.aux)
        states = [*aux, self.final]
        if len(aux) != num_layers or any(state.shape[-1] != hidden_size for state in states):
            shapes = [tuple(state.shape) for state in states]
            raise ValueError(f"states are {shapes}, expected {num_layers + 1} of width {hidden_size}")
        if min(state.shape[0] for state in (self.token_ids, *states)) < num_rows:
            rows = [state.shape[0] for state in (self.token_ids, *states)]
            raise ValueError(f"token ids and states have {rows} rows, {num_rows} are needed")
        return states
