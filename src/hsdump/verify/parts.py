"""Parts of hidden states: what an engine hands out whose layers keep the sum apart, or whose norms write over it.

A decoder layer adds to a sum, and hidden_states[k] is the sum in front of layer k. Engines that fuse the adding with
the norm behind it carry two tensors from layer to layer; an auxiliary capture that takes one of them, or takes it
before a kernel has written over it, hands out one of the parts named here.

Letters: B = sequences, S = tokens of each, H = hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

Parts = dict[str, list[Any]]
"""Name to what could be meant by it, torch [B, S, H]."""


def without_residual(index: int) -> str:
    """Name what layer index-1 adds to the sum in hidden_states[index]: its last module's output, or all of it."""
    return f"{index} without its residual"


def behind_norm(index: int) -> str:
    """Name what the norm in front of layer `index` makes of hidden_states[index]."""
    return f"{index} behind the next norm"


def with_attention(index: int) -> str:
    """Name hidden_states[index] with what the attention of layer `index` adds: what its second norm reads."""
    return f"{index} and the next attention"


@contextlib.contextmanager
def watched(layer: Any, index: int, shape: Any, parts: Parts) -> Iterator[None]:
    """Keep the parts that layer `index` computes while it runs.

    Args:
        shape: of hidden states, B, S, H. Modules that put out or read anything else are passed over.
    """
    outputs: list[Any] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        made = _tensor(output, shape)
        if "Norm" in type(module).__name__:
            name, part = (with_attention, _tensor(inputs, shape)) if outputs else (behind_norm, made)
            if part is not None:
                parts.setdefault(name(index), []).append(part)
        outputs.append(made)

    handles = [module.register_forward_hook(keep) for module in layer.children()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if outputs and outputs[-1] is not None:
            parts.setdefault(without_residual(index + 1), []).append(outputs[-1])


def add_differences(hidden: Mapping[int, Any], parts: Parts, num_layers: int) -> None:
    """Add all that each layer adds, where both its ends are known; the last one's end is behind the norm."""
    for index, values in hidden.items():
        if index < num_layers and index - 1 in hidden:
            parts.setdefault(without_residual(index), []).append(values - hidden[index - 1])


def _tensor(found: Any, shape: Any) -> Any:
    """Give a copy of a module's first tensor in the shape of hidden states, or None."""
    values = found[0] if isinstance(found, tuple) and found else found
    if not hasattr(values, "numel") or values.numel() != shape.numel():
        return None
    return values.reshape(shape).clone()
