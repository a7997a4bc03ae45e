"""Attention of the training-time test: what a drafter sees when it drafts from every position at once.

Step 0 of position t reads the target's states up to t. Step k drafts the token k places further and reads the same
states up to t, and behind them the drafter's own steps 1..k of the *same* position: those it has drafted itself by
then. So keys of step 0 are attended causally, and keys of later steps on the diagonal only.

The diagonal is joined to the causal part by their logarithms of summed exponentials: the causal part is an ordinary
attention whose mask never changes, and no key or value is copied from step to step.

Letters: T = tokens of a packed batch, Q = query heads, N = key/value heads, G = Q // N, D = head width.
Source: EAGLE-3 (arXiv 2503.01840), section 3, "training-time test".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Causal(Protocol):
    """Attention to earlier tokens of the same document."""

    def __call__(self, q_QTD: Tensor, k_NTD: Tensor, v_NTD: Tensor) -> tuple[Tensor, Tensor]:
        """Give the output [Q, T, D] and the logarithm of the summed exponentials [Q, T]."""


class ByDocument:
    """Dense attention, one document after another: exact, and fast for the short documents of a CPU run."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """Args:
        lengths: tokens of each document, in order; they add up to T.
        """
        self._lengths = [int(length) for length in lengths]

    def __call__(self, q_QTD: Tensor, k_NTD: Tensor, v_NTD: Tensor) -> tuple[Tensor, Tensor]:
        heads, _, width = q_QTD.shape
        groups = heads // k_NTD.shape[0]
        outs, sums = [], []
        start = 0
        for length in self._lengths:
            rows = slice(start, start + length)
            start += length
            q = q_QTD[:, rows].reshape(-1, groups * length, width)  # heads of a group share one key head
            scores = (q @ k_NTD[:, rows].transpose(1, 2)).view(heads, length, length).float() * width**-0.5
            scores = scores + torch.full((length, length), float("-inf"), device=scores.device).triu(1)
            summed = torch.logsumexp(scores, dim=-1)
            weights = (scores - summed[..., None]).exp().to(v_NTD.dtype)
            out = weights.view(-1, groups * length, length) @ v_NTD[:, rows]
            outs.append(out.view(heads, length, width))
            sums.append(summed)
        return torch.cat(outs, dim=1), torch.cat(sums, dim=1)


SHORT = 128
"""Fewer rows than this are attended densely on a GPU: compiled for any length, flex attention does not lower lengths
below a block (pytorch#147756), and there is nothing to save."""


class Flex:
    """PyTorch's flex attention with a mask of blocks: for long packed batches on a GPU, where it is compiled."""

    def __init__(self, document_ids_T: Tensor) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        self._dense: ByDocument | None = None
        if refused() or (document_ids_T.is_cuda and len(document_ids_T) < SHORT):
            self._dense = ByDocument(torch.unique_consecutive(document_ids_T, return_counts=True)[1].tolist())
            return

        def mask(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (document_ids_T[query] == document_ids_T[key])

        total = len(document_ids_T)
        self._mask = create_block_mask(mask, None, None, total, total, device=str(document_ids_T.device))
        self._attend = _compiled() if document_ids_T.is_cuda else _flex()

    def __call__(self, q_QTD: Tensor, k_NTD: Tensor, v_NTD: Tensor) -> tuple[Tensor, Tensor]:
        from torch.nn.attention.flex_attention import AuxRequest

        if self._dense is not None:
            return self._dense(q_QTD, k_NTD, v_NTD)
        out, aux = self._attend(
            q_QTD[None],
            k_NTD[None],
            v_NTD[None],
            block_mask=self._mask,
            enable_gqa=q_QTD.shape[0] != k_NTD.shape[0],
            return_aux=AuxRequest(lse=True),
        )
        return out[0], aux.lse[0]


def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


_COMPILED: list[Any] = []
_REFUSED: list[str] = []


def _compiled() -> Any:
    """Compile once a process; lengths change from batch to batch, so shapes are dynamic."""
    if not _COMPILED:
        _COMPILED.append(torch.compile(_flex(), dynamic=True))
    return _COMPILED[0]


def refuse(reason: str) -> None:
    """Attend densely in this process from here on, also where flex attention is asked for."""
    _REFUSED.append(reason)


def refused() -> str:
    """Why flex attention is not used in this process; empty: it is."""
    return _REFUSED[0] if _REFUSED else ""


def ttt_attention(q_QTD: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], causal: Causal) -> Tensor:
    """Attend as step k does, k = len(keys) - 1.

    Args:
        keys: [N, T, D] of steps 0..k.
        values: as `keys`.

    Returns:
        [Q, T, D]
    """
    out_QTD, sums_QT = causal(q_QTD, keys[0], values[0])
    if len(keys) == 1:
        return out_QTD
    heads, total, width = q_QTD.shape
    grouped_NGTD = q_QTD.view(keys[0].shape[0], -1, total, width)
    own = [((grouped_NGTD * key[:, None]).sum(-1).float() * width**-0.5).view(heads, total) for key in keys[1:]]
    weights = torch.softmax(torch.stack([sums_QT.float(), *own]), dim=0).to(out_QTD.dtype)
    weights = weights.view(len(keys), *grouped_NGTD.shape[:3], 1)
    joined = weights[0] * out_QTD.view(grouped_NGTD.shape)
    for weight, value in zip(weights[1:], values[1:], strict=True):
        joined = torch.addcmul(joined, weight, value[:, None])  # one pass, and no value copied for each of its heads
    return joined.view(heads, total, width)
