"""bfloat16 on a processor that has no instructions for it: torch then multiplies its matrices ten times slower than
float32 ones. Here the same numbers are multiplied in float32 and rounded once, which is what torch itself does up to
the order of its sums.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def widen_where_needed() -> None:
    """Replace torch's `linear` and `scaled_dot_product_attention` in this process, where that makes them faster."""
    words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split())
    functional = torch.nn.functional
    if words & {"amx_bf16", "avx512_bf16", "bf16", "svebf16"} or hasattr(functional.linear, "widens"):
        return
    functional.linear = _widened_linear(functional.linear)
    functional.scaled_dot_product_attention = _widened_attention(functional.scaled_dot_product_attention)


def _widened_linear(plain: Any) -> Any:
    def linear(input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002 - torch's own name
        if not _is_ours(input, weight):
            return plain(input, weight, bias)
        wide = _widened(weight)
        return plain(input.float(), wide, None if bias is None else bias.float()).to(torch.bfloat16)

    linear.widens = True  # type: ignore[attr-defined]  # a mark: twice would be once too often
    return linear


def _widened(weight: Any) -> Any:
    """Give the weight in float32, kept for the next time where torch tells whether it has changed since."""
    if weight.is_inference():
        return weight.float()
    version, wide = getattr(weight, "_widened", (None, None))
    if version != weight._version:
        wide = weight.detach().float()
        weight._widened = (weight._version, wide)
    return wide


def _widened_attention(plain: Any) -> Any:
    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not _is_ours(query, key):
            return plain(query, key, value, attn_mask, *args, **kwargs)
        if attn_mask is not None and attn_mask.dtype == torch.bfloat16:
            attn_mask = attn_mask.float()
        return plain(query.float(), key.float(), value.float(), attn_mask, *args, **kwargs).to(torch.bfloat16)

    return attention


def _is_ours(one: Any, other: Any) -> bool:
    wanted = bool(one.dtype == other.dtype == torch.bfloat16 and one.device.type == "cpu")
    # A gradient would not reach a weight through its widened copy.
    return wanted and not (torch.is_grad_enabled() and (one.requires_grad or other.requires_grad))
