"""An independent implementation of any depth: transformers' own modules, one decoder layer of the checkpoint in memory.

The whole model exists without memory (on torch's meta device). Each layer gets its weights from the checkpoint's files
just before it runs and gives them back afterwards, so a layer's size is what counts and not the model's.

Letters: B = sequences, S = tokens of each, H = hidden size, E = experts, I = their inner size.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsdump.errors import InputError, UsageError
from hsdump.verify.checkpoint import EMBEDDING, FIX, NORM, Checkpoint
from hsdump.verify.parts import Parts, watched

KNOWN_AS = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers knows under another name."""

_FUSED = re.compile(r"(.*experts)\.(gate_up_proj|down_proj)$")


class StreamingReference:
    """Runs any stretch of a model's layers, over a few dozen tokens."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Build the model without its weights.

        Raises:
            UsageError: no torch here.
            InputError: an architecture that transformers does not know, or a checkpoint without its tensors.
        """
        self.checkpoint = checkpoint
        torch = _torch()
        self._torch = torch
        self._dtype = getattr(torch, checkpoint.dtype)
        model = _on_meta(checkpoint, self._dtype)
        base = model.base_model
        self._base = getattr(base, "language_model", base)
        self._layers = list(self._base.layers)
        self._config = self._base.config
        self._base.rotary_emb = type(self._base.rotary_emb)(config=self._config)
        norm = checkpoint.find(NORM)
        if norm is None:
            raise InputError(f"{checkpoint.folder} holds no final norm", FIX)
        stem = norm.removesuffix("weight")
        self._fill(self._base.norm, {name: stem + name for name in self._base.norm.state_dict()})
        self.seen_layers: list[int] = []
        """Layers that were read so far, in order."""

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def embed(self, ids_BS: NDArray[np.int64]) -> Any:
        """Read the embedding rows of tokens: transformers' hidden_states[0], torch [B, S, H]."""
        name = self.checkpoint.find(EMBEDDING)
        if name is None:
            raise InputError(f"{self.checkpoint.folder} holds no embeddings", FIX)
        rows = self.checkpoint.rows(name, ids_BS.reshape(-1)).reshape(*ids_BS.shape, -1)
        return self._torch.from_numpy(rows).to(self._dtype) * self.checkpoint.embedding_factor

    def run(self, hidden_BSH: Any, first: int, last: int, parts: Parts | None = None) -> dict[int, Any]:
        """Run layers first..last-1 on hidden_states[first].

        Args:
            parts: takes what the layers compute on the way.

        Returns:
            Index into hidden_states to torch [B, S, H]: first+1..last, the last one after the final norm when it is
            num_layers.
        """
        torch = self._torch
        outputs: dict[int, Any] = {}
        self._base.layers = torch.nn.ModuleList(self._layers[first:last])
        with contextlib.ExitStack() as hooks, torch.inference_mode():
            for index in range(first, last):
                hooks.enter_context(self._streamed(index, outputs))
                if parts is not None:
                    hooks.enter_context(watched(self._layers[index], index, hidden_BSH.shape, parts))
            result = self._base(inputs_embeds=hidden_BSH.to(self._dtype), use_cache=False)
        if last == self.num_layers:
            outputs[last] = result.last_hidden_state
        return outputs

    def norm(self, hidden_BSH: Any) -> Any:
        """Apply the final norm."""
        with self._torch.inference_mode():
            return self._base.norm(hidden_BSH.to(self._dtype))

    @contextlib.contextmanager
    def _streamed(self, index: int, outputs: dict[int, Any]) -> Iterator[None]:
        """Give layer `index` its weights while it runs, and keep what it puts out."""
        layer = self._layers[index]
        prefix = f"{self.checkpoint.prefix}layers.{index}."

        def load(module: Any, _inputs: Any) -> None:
            names = {name: prefix + name for name in module.state_dict()}
            self._fill(module, names)
            self.seen_layers.append(index)

        def unload(module: Any, _inputs: Any, output: Any) -> None:
            outputs[index + 1] = (output[0] if isinstance(output, tuple) else output).clone()
            module.to("meta")

        handles = [layer.register_forward_pre_hook(load), layer.register_forward_hook(unload)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _fill(self, module: Any, names: dict[str, str]) -> None:
        """Read a module's parameters and buffers: its own name to the checkpoint's."""
        torch = self._torch
        shapes = {name: (tuple(value.shape), value.dtype) for name, value in module.state_dict().items()}
        state = {}
        for name, stored in names.items():
            shape, dtype = shapes[name]
            values = self._tensor(stored, shape)
            state[name] = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
        module.load_state_dict(state, assign=True)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Read one tensor in the shape that the module wants, experts put together where it keeps them as one."""
        if name in self.checkpoint.places:
            values = self.checkpoint.whole(name)
        elif (match := _FUSED.match(name)) is not None:
            values = self._experts(match[1], match[2])
        else:
            raise InputError(f"{self.checkpoint.folder} has no tensor {name}{self._quantized()}", FIX)
        if values.shape == shape:
            return values
        if values.ndim > 1 and values.swapaxes(-1, -2).shape == shape:
            turned: NDArray[np.float32] = values.swapaxes(-1, -2)
            return turned
        raise InputError(f"{name} is {values.shape} in the checkpoint, the model wants {shape}", FIX)

    def _quantized(self) -> str:
        """Say that a tensor may be missing because it is there in another form."""
        checkpoint = self.checkpoint
        config = checkpoint.raw_config.get("quantization_config") or checkpoint.config.get("quantization_config")
        how = config.get("quant_method", "quantized") if isinstance(config, dict) else None
        return f": its weights are quantized ({how}), and only fp8 with plain scales can be read" if how else ""

    def _experts(self, prefix: str, which: str) -> NDArray[np.float32]:
        """Stack the experts' matrices: [E, 2 I, H] of gate and up, or [E, H, I] of down."""
        parts = ("gate_proj", "up_proj") if which == "gate_up_proj" else ("down_proj",)
        experts: list[NDArray[np.float32]] = []
        while f"{prefix}.{len(experts)}.{parts[0]}.weight" in self.checkpoint.places:
            number = len(experts)
            experts.append(
                np.concatenate([self.checkpoint.whole(f"{prefix}.{number}.{part}.weight") for part in parts])
            )
        if not experts:
            raise InputError(f"{self.checkpoint.folder} has no experts {prefix}.0{self._quantized()}", FIX)
        return np.stack(experts)


def first_line(error: Exception) -> str:
    """Give what other people's code says of an error, without the rest."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise UsageError("the reference needs torch", 'install it: pip install "hsdump[train]"') from error
    return torch


def _on_meta(checkpoint: Checkpoint, dtype: Any) -> Any:
    """Build transformers' model of this checkpoint without memory for its weights, and without running its code."""
    import torch
    import transformers

    kind = str(checkpoint.config.get("model_type", ""))
    try:
        if kind in KNOWN_AS:
            text = {key: value for key, value in checkpoint.config.items() if key not in ("model_type", "auto_map")}
            config = transformers.AutoConfig.for_model(KNOWN_AS[kind], **text)
        else:
            config = transformers.AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
            config = config.get_text_config()
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        if not hasattr(model.base_model, "layers") or not hasattr(model.base_model, "norm"):
            raise ValueError(f"{type(model).__name__} keeps its layers elsewhere")
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
        release = f"transformers {transformers.__version__}"
        raise InputError(
            f"{release} builds no model of type {kind!r} from {checkpoint.folder}: {first_line(error)}",
            "a newer transformers may know it: pip install -U transformers",
        ) from error
    return model.eval()
