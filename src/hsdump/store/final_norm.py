"""The target's final norm: from the state behind it to one in front of it, and the other way.

RMSNorm is y = x / rms(x) * w. From y the length of x cannot be had back, but nothing that reads x through the norm
can tell: norm(y / w) = y, because y / w has rms 1 (up to eps). So y / w stands for x wherever a trainer applies the
target's own norm, which is what those that want the pre-norm state do.

Letters: S = tokens of one sample, H = hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from hsdump.arrays import StateArray, to_float32
from hsdump.errors import InputError
from hsdump.store.fp8 import from_float32

OFFSET_FAMILIES = ("gemma",)
"""Model types whose norm multiplies by 1 + w, so that the plain formula would be silently wrong."""

NAMES = ("model.norm.weight", "norm.weight", "language_model.model.norm.weight", "model.language_model.norm.weight")
"""Where checkpoints keep the final norm's weight."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FinalNorm:
    """An RMSNorm's parameters."""

    weight: NDArray[np.float32]
    """[H]"""

    eps: float

    @classmethod
    def load(cls, model: Path, hidden_size: int) -> FinalNorm:
        """Read the final norm from a checkpoint folder.

        Raises:
            InputError: no folder, no such weight, or a norm that these formulas do not hold for.
        """
        config = _config(model)
        kind = str(config.get("model_type", ""))
        if kind.startswith(OFFSET_FAMILIES) or config.get("rms_norm_eps") is None:
            what = f"{model}: the final norm of model type {kind!r} is not a plain RMSNorm"
            raise InputError(what, "export to a format that takes the state as it is stored")
        weight = _find_weight(model, hidden_size)
        eps = config["rms_norm_eps"]
        assert isinstance(eps, int | float)
        return cls(weight=weight, eps=float(eps))

    def undo(self, state_SH: StateArray, dtype: str) -> StateArray:
        """Give a state whose norm is the given one: rms 1, same direction as the lost pre-norm state."""
        return from_float32(to_float32(state_SH, dtype) / self.weight, dtype)

    def apply(self, state_SH: StateArray, dtype: str) -> StateArray:
        """Apply the norm as models do: in float32, rounded to the dtype before and after the weight."""
        wide = to_float32(state_SH, dtype)
        scale = 1 / np.sqrt(np.square(wide).mean(axis=1, keepdims=True) + np.float32(self.eps))
        normed = to_float32(from_float32((wide * scale).astype(np.float32), dtype), dtype)
        return from_float32(normed * self.weight, dtype)


def _config(model: Path) -> dict[str, object]:
    try:
        config = msgspec.json.decode((model / "config.json").read_bytes(), type=dict[str, object])
    except (OSError, msgspec.MsgspecError) as error:
        what = f"{model}: its config.json cannot be read ({error})"
        raise InputError(what, "name the target's folder with --model") from error
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _find_weight(model: Path, hidden_size: int) -> NDArray[np.float32]:
    from safetensors import safe_open

    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            names = set(file.keys())
        name = next((name for name in NAMES if name in names), None)
        if name is not None:
            return _read(path, name, hidden_size)
    what = f"{model}: no safetensors file holds one of {', '.join(NAMES)}"
    raise InputError(what, "name the folder of the target's checkpoint with --model")


def _read(path: Path, name: str, hidden_size: int) -> NDArray[np.float32]:
    """Read one tensor by hand, since numpy's reader knows no bfloat16."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        info = msgspec.json.decode(file.read(size), type=dict[str, dict[str, object]])[name]
        start, end = msgspec.convert(info["data_offsets"], tuple[int, int])
        file.seek(8 + size + start)
        data = file.read(end - start)
    kinds = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    kind = kinds.get(str(info["dtype"]))
    if kind is None or info["shape"] != [hidden_size]:
        what = f"{path}: {name} is {info['dtype']} {info['shape']}, the store's states are {hidden_size} wide"
        raise InputError(what, "name the folder of the model that was captured")
    bits = np.frombuffer(data, {"bfloat16": "<u2", "float16": "<f2", "float32": "<f4"}[kind])
    weight = to_float32(bits, kind)
    if not np.isfinite(weight).all() or not weight.all():
        raise InputError(f"{path}: {name} holds zeros, which no division undoes", "export to a post-norm format")
    return weight
