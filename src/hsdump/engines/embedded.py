"""The embedded engine: the target runs in this process through transformers, one sample at a time.

For trying things out without a server, and as a second opinion on what a server hands out. No padding and no batches:
every sample is computed at its exact length, in the model's own dtype unless told otherwise. The final state is taken
to be post-norm only after the numbers of a small forward said so, because model files differ in what they append to
`hidden_states` last; the same forward proves that the last decoder layer's output is the state in front of that norm.

Letters: S = tokens of one sample, H = hidden size, L = auxiliary layers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hsdump._version import __version__
from hsdump.arrays import StateArray
from hsdump.engines.base import CapturedSample, CaptureFailed, CaptureRequest, ServerLoad
from hsdump.errors import InputError, ServerError, UsageError
from hsdump.layers import FINAL_STATES, check_layers, eagle3_layers
from hsdump.schema import DTYPE_BYTES, EngineInfo, StateShape

PROBE_TOKENS = 8

SAME_NUMBERS = 1e-3
"""Relative error up to which two states count as one. The same module on the same input gives the same bits; a norm
left out or applied twice is off by far more than a tenth."""

COMPUTE = (MODEL, FLOAT32) = ("model", "float32")
"""What an embedded model may reckon in."""

NO_LIMIT = 1 << 31
"""Context length of a model whose config names none."""


class EmbeddedEngine:
    """A Hugging Face causal language model, loaded at the handshake. Use from one event loop."""

    def __init__(
        self,
        model_path: str,
        *,
        layers: tuple[int, ...] | None,
        device: str = "cpu",
        dtype: str | None = None,
        compute: str = MODEL,
        final_state: str = "post_norm",
    ) -> None:
        """Args:
        model_path: a model folder, or the name of a model that is in the local Hugging Face cache.
        layers: ids in hsdump's meaning; None: the EAGLE-3 ones for the model's depth.
        device: as torch names it, such as `cpu` or `cuda:0`.
        dtype: of the states, a key of `DTYPE_BYTES`; None: the checkpoint's own.
        compute: `float32` to reckon in it and round only the states, or `model`. A CPU without bfloat16 instructions is
            several times as fast in float32.
        final_state: `post_norm`, `pre_norm` (the last decoder layer's output) or `both`.

        Raises:
            UsageError: an unknown dtype.
        """
        assert final_state in FINAL_STATES, final_state
        if dtype is not None and dtype not in DTYPE_BYTES:
            raise UsageError(f"dtype {dtype} cannot be captured", f"use one of {', '.join(DTYPE_BYTES)}")
        assert compute in COMPUTE, compute
        # A store is read from other folders too.
        self.model_path = str(Path(model_path).resolve()) if Path(model_path).is_dir() else model_path
        self._layers, self._device, self._dtype, self._final_state = layers, device, dtype, final_state
        self._compute = compute
        self._rounded: Any = None
        """The dtype that states are rounded to, where it is not what the model reckons in."""

        self._model: Any = None
        self._last_layer: Any = None
        self._info: EngineInfo | None = None
        self._one_at_a_time = asyncio.Lock()

    def handshake(self) -> EngineInfo:
        """Load the model and prove by numbers what its hidden states mean.

        Raises:
            UsageError: no torch, an unknown device, or layers that the model does not have.
            InputError: the path holds no model that can be loaded completely and safely.
            ServerError: the model's hidden states do not mean what hsdump stores.
        """
        torch, transformers = _imports()
        model = _to_device(_load(self.model_path, self._dtype), self._device)
        if self._compute == FLOAT32 and getattr(model, "is_quantized", False):
            what = f"{self.model_path} is quantized; its weights cannot be widened to float32"
            raise InputError(what, "leave --compute out")
        if self._compute == FLOAT32 and model.dtype != torch.float32:
            self._rounded, model = model.dtype, model.float()  # exact: every bfloat16 is a float32
        config = model.config.get_text_config()
        num_layers = int(config.num_hidden_layers)
        wanted = eagle3_layers(num_layers) if self._layers is None else check_layers(self._layers, num_layers)
        with torch.inference_mode():
            final = _prove_meaning(model, num_layers, int(config.vocab_size))
        self._last_layer = _decoder_parts(model, num_layers)[0][-1]
        dtype = str(self._rounded or final.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise ServerError(f"{self.model_path} computes in {dtype}", f"choose one of {', '.join(DTYPE_BYTES)}")
        shape = StateShape(layers=wanted, hidden_size=int(final.shape[-1]), dtype=dtype, final_state=self._final_state)
        context = getattr(config, "max_position_embeddings", None)
        self._model = model
        self._info = EngineInfo(
            engine="transformers",
            # Another arithmetic gives other last bits, so the two are not one data set.
            engine_version=transformers.__version__ + (f"+{FLOAT32}" if self._rounded else ""),
            attach="embedded",
            hsdump_version=__version__,
            model_path=self.model_path,
            model_class=type(model).__name__,
            num_layers=num_layers,
            vocab_size=int(config.vocab_size),
            context_length=int(context or NO_LIMIT),
            shape=shape,
            device=str(model.device),
            notes=self._notes(context),
        )
        return self._info

    def _notes(self, context: int | None) -> tuple[str, ...]:
        notes = [] if context else ["the model's config names no context length: none is checked"]
        if self._rounded is not None:
            notes.append(f"computed in float32, the states rounded to {str(self._rounded).removeprefix('torch.')}")
        return tuple(notes)

    async def capture(self, request: CaptureRequest) -> CapturedSample:
        """Run one sample in a worker thread; a second one waits for the first.

        Raises:
            CaptureFailed: no tokens, tokens that the model does not have, more than its context, or no memory left.
        """
        self._check(request)
        async with self._one_at_a_time:
            states = await asyncio.to_thread(self._forward, request)
        return CapturedSample(token_ids=request.input_ids.copy(), states=states)

    @property
    def lost(self) -> bool:
        return False

    @property
    def spool_room(self) -> float:
        return 1.0

    async def reconnect(self) -> EngineInfo:
        return self._known()

    async def load(self) -> ServerLoad | None:
        return None

    def request_id(self, request: CaptureRequest) -> str:  # noqa: ARG002 - the protocol's
        return ""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Nothing to do: a forward is not interrupted."""

    async def close(self) -> None:
        """Let the model go."""
        async with self._one_at_a_time:
            self._model = self._last_layer = None

    def _check(self, request: CaptureRequest) -> None:
        info, ids = self._known(), request.input_ids
        if not len(ids):
            raise CaptureFailed("empty", "the sample has no tokens", transient=False)
        if len(ids) > info.context_length:
            detail = f"{len(ids)} tokens, the model takes {info.context_length}"
            raise CaptureFailed("longer-than-context", detail, transient=False)
        outside = np.flatnonzero((ids < 0) | (ids >= info.vocab_size))
        if len(outside):
            row = int(outside[0])
            detail = f"row {row} is token {ids[row]}, the vocabulary has {info.vocab_size}"
            raise CaptureFailed("token-outside-vocabulary", detail, transient=False)

    def _forward(self, request: CaptureRequest) -> tuple[StateArray, ...]:
        """Runs in a worker thread. Gives arrays [S, H] of their own memory, in the order of `StateShape.names`."""
        import torch

        shape = self._known().shape
        try:
            with torch.inference_mode(), _outputs_of([self._last_layer]) as pre_norm:
                hidden = _hidden_states(self._model, request.input_ids)
                finals = {"post_norm": [hidden[-1]], "pre_norm": pre_norm, "both": [hidden[-1], *pre_norm]}
                states = [hidden[index] for index in shape.layers] + finals[shape.final_state]
                return tuple(_as_array(state_1SH[0].to(self._rounded or state_1SH.dtype)) for state_1SH in states)
        except torch.OutOfMemoryError as error:
            detail = f"{len(request.input_ids)} tokens on {self._device}: {_first_line(error)}"
            raise CaptureFailed("out-of-memory", detail, transient=False) from error

    def _known(self) -> EngineInfo:
        assert self._info is not None, "handshake first"
        assert self._model is not None, "closed"
        return self._info


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Tell whether this CPU multiplies bfloat16 itself: AMX, AVX-512 BF16, or ARM's. True where nobody can say."""
    try:
        words = set(cpuinfo.read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return True
    return bool(words & {"amx_bf16", "avx512_bf16", "bf16", "svebf16"})


def _imports() -> tuple[Any, Any]:
    """Import torch and transformers, which take seconds and may be missing."""
    try:
        import torch
    except ImportError as error:
        raise UsageError(
            f"the embedded engine needs torch, which this environment does not have ({error})",
            'install it: pip install "hsdump[train]", or use a server: --engine sglang --server URL',
        ) from error
    import transformers

    return torch, transformers


def _load(model_path: str, dtype: str | None) -> Any:
    """Load a checkpoint's every weight, from safetensors only, and without running code that came with it."""
    import transformers

    # Renamed in 4.56; the older spelling is removed in later releases, the newer one unknown to earlier ones.
    release = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    dtype_option = {"dtype" if release >= (4, 56) else "torch_dtype": dtype or "auto"}
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            model_path,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **dtype_option,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        known = Path(model_path).is_dir()
        raise InputError(
            f"{model_path} cannot be loaded as a model: {type(error).__name__}: {_first_line(error)}",
            "it needs config.json and safetensors weights of an architecture that this transformers release knows"
            if known
            else "name an existing model folder with --model (download a hub model first: hf download NAME)",
        ) from error
    # A weight that is missing would be filled with random numbers, and only a warning says so.
    lost = sorted(str(key) for name in ("missing_keys", "mismatched_keys") for key in report[name])
    if lost:
        raise InputError(
            f"{model_path} lacks {len(lost)} weights of {type(model).__name__}, such as {lost[0]}",
            "the download or the conversion is incomplete: fetch the checkpoint again",
        )
    return model.eval()


def _to_device(model: Any, device: str) -> Any:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch asserts when it was built without that device
        raise UsageError(f"the model cannot be put on {device!r}: {_first_line(error)}", "use cpu or cuda:0") from error


def _hidden_states(model: Any, input_ids: Any) -> Sequence[Any]:
    """Run the decoder without the lm_head, whose logits nobody reads here. Gives num_layers+1 tensors [1, S, H]."""
    import torch

    ids_1S = torch.as_tensor(np.asarray(input_ids, dtype=np.int64), device=model.device)[None]
    hidden: Sequence[Any] = model.base_model(ids_1S, output_hidden_states=True, use_cache=False).hidden_states
    return hidden


def _prove_meaning(model: Any, num_layers: int, vocab_size: int) -> Any:
    """Compare `hidden_states` with what the decoder layers and the final norm really put out.

    Returns:
        [1, S, H] the final state of the probe, proved to be post-norm.

    Raises:
        ServerError: index k is not the output of decoder layer k-1, or the last one is not the final norm's output.
    """
    layers, norms = _decoder_parts(model, num_layers)
    ids = (np.arange(PROBE_TOKENS, dtype=np.int64) * 7 + 1) % vocab_size
    with _outputs_of(layers) as outputs:
        hidden = _hidden_states(model, ids)
    name = type(model).__name__
    if len(hidden) != num_layers + 1 or len(outputs) != num_layers:
        raise _unknown_meaning(name, f"{len(hidden)} hidden states and {len(outputs)} outputs of {num_layers} layers")
    for index in range(1, num_layers):
        error = _relative_error(hidden[index], outputs[index - 1])
        if error > SAME_NUMBERS:
            raise _unknown_meaning(
                name, f"hidden_states[{index}] is not the output of layer {index - 1} (off by {error:.3g})"
            )
    off = min((_relative_error(hidden[-1], norm(outputs[-1])) for norm in norms), default=float("inf"))
    if off > SAME_NUMBERS:
        raw = _relative_error(hidden[-1], outputs[-1])
        what = "the last layer's output before any norm" if raw <= SAME_NUMBERS else "something else"
        raise _unknown_meaning(name, f"hidden_states[-1] is not the final norm's output (off by {off:.3g}) but {what}")
    return hidden[-1]


def _unknown_meaning(name: str, found: str) -> ServerError:
    return ServerError(
        f"the hidden states of {name} do not mean what hsdump stores: {found}",
        "capture this model from its server: --engine sglang --server URL",
    )


def _decoder_parts(model: Any, num_layers: int) -> tuple[list[Any], list[Any]]:
    """Find the decoder layers and the norms that stand beside them: one of those is the final norm."""
    import torch

    for parent in model.base_model.modules():
        for child in parent.children():
            if isinstance(child, torch.nn.ModuleList) and len(child) == num_layers:
                siblings = [module for module in parent.children() if "norm" in type(module).__name__.lower()]
                return list(child), siblings
    raise _unknown_meaning(type(model).__name__, f"no list of {num_layers} decoder layers was found")


@contextmanager
def _outputs_of(layers: Sequence[Any]) -> Iterator[list[Any]]:
    """Collect what each layer puts out while the body runs."""
    outputs: list[Any] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        # Copied: a later layer may add into the same memory.
        outputs.append((output[0] if isinstance(output, tuple) else output).clone())

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _relative_error(found: Any, expected: Any) -> float:
    """Give |found - expected| / |expected| over the whole tensor; infinite where the shapes or the numbers are none."""
    if found.shape != expected.shape:
        return float("inf")
    error = float((found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))
    return float("inf") if math.isnan(error) else error


def _as_array(state_SH: Any) -> StateArray:
    """Bring one state to numpy: bfloat16 as its bits, the others as themselves."""
    import torch

    on_cpu = state_SH.contiguous().cpu()
    if on_cpu.dtype == torch.bfloat16:
        bits: StateArray = on_cpu.view(torch.int16).numpy().view(np.uint16)
        return bits
    array: StateArray = on_cpu.numpy()
    return array


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
