"""What a model folder says about the states that it will give, without loading it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsdump.errors import InputError
from hsdump.layers import check_layers, eagle3_layers
from hsdump.schema import DTYPE_BYTES, StateShape


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """From `config.json`."""

    shape: StateShape
    num_layers: int
    vocab_size: int | None
    context_length: int | None


def read_model_facts(model: str, layers: tuple[int, ...] | None) -> ModelFacts:
    """Read a model folder's `config.json`; multimodal models keep the numbers in `text_config`.

    Args:
        layers: ids in hsdump's meaning; None for the EAGLE-3 ones.

    Raises:
        InputError: no folder, no config, or one without the numbers.
        UsageError: layers that the model does not have.
    """
    path = Path(model) / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        text: dict[str, Any] = {**config, **(config.get("text_config") or {})}
        num_layers, hidden_size = int(text["num_hidden_layers"]), int(text["hidden_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} cannot be read: {type(error).__name__}: {error}",
            "name the model's folder with --model, or give --hidden-size, --states and --dtype",
        ) from error
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        dtype = "bfloat16"  # quantized checkpoints: what is computed between the layers is bfloat16
    wanted = eagle3_layers(num_layers) if layers is None else check_layers(layers, num_layers)
    context = text.get("max_position_embeddings")
    return ModelFacts(
        shape=StateShape(layers=wanted, hidden_size=hidden_size, dtype=dtype, final_state="post_norm"),
        num_layers=num_layers,
        vocab_size=int(text["vocab_size"]) if text.get("vocab_size") else None,
        context_length=int(context) if context else None,
    )
