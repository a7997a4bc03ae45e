"""Which experts did each token go to? bfloat16 noise turns near ties of a router, and then the states differ for real.

So a mixture-of-experts model is compared where routing agrees, and the share of that is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.server.driving import model


def routing_agrees(path: Path, ids: NDArray[np.int64], inputs: dict[int, NDArray[np.float32]]) -> bool:
    """Tell whether the server routed every token of a sample as transformers does.

    transformers runs twice: on its own, and with the input of every decoder layer replaced by the server's captured
    state. The second run's routers see what the server's saw.

    Args:
        ids: int64 [S].
        inputs: decoder layer -> the server's state at its input, float32 [S, H]; all layers but the first.
    """
    alone = _chosen_experts(path, ids, {})
    replayed = _chosen_experts(path, ids, inputs)
    return all(torch.equal(a, b) for a, b in zip(alone, replayed, strict=True))


def _chosen_experts(path: Path, ids: NDArray[np.int64], inputs: dict[int, NDArray[np.float32]]) -> list[torch.Tensor]:
    oracle, chosen, hooks = model(path), [], []

    def replace(layer: int) -> Callable[..., Any]:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = torch.from_numpy(inputs[layer]).to(torch.bfloat16)[None]
            return (given, *args[1:]), kwargs

        return hook

    def note(_module: Any, args: tuple[Any, ...]) -> None:
        chosen.append(args[1].sort(dim=-1).values.clone())

    try:
        for number, layer in enumerate(oracle.model.layers):
            if number in inputs:
                hooks.append(layer.register_forward_pre_hook(replace(number), with_kwargs=True))
            if hasattr(layer.mlp, "experts"):
                hooks.append(layer.mlp.experts.register_forward_pre_hook(note))
        with torch.no_grad():
            oracle(torch.tensor(ids)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return chosen
