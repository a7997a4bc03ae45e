"""What a loaded `ModelRunner` says about itself, and which of its settings capture cannot live with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerFacts:
    """One scheduler process's model, in hsdump's words."""

    model_path: str
    model_class: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    dtype: str
    device: str
    tp_rank: int
    tp_size: int
    dp_size: int
    host: str
    port: int
    rows_per_pass: int
    """At most, of prefill."""

    no_decode: str = "this tap sees prefill only"
    """Why decode steps cannot be captured; empty where they can."""


def read_facts(runner: Any) -> RunnerFacts:
    """Read them. Raises AttributeError or ImportError when this SGLang keeps them elsewhere."""
    from sglang.srt.distributed.parallel_state import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    config, args = runner.model_config, runner.server_args
    return RunnerFacts(
        model_path=str(args.model_path),
        model_class=type(runner.model).__name__,
        num_layers=int(config.num_hidden_layers),
        hidden_size=int(config.hidden_size),
        vocab_size=int(config.vocab_size),
        context_length=int(config.context_len),
        dtype=str(config.dtype).removeprefix("torch."),
        device=str(runner.device),
        tp_rank=get_tensor_model_parallel_rank(),
        tp_size=get_tensor_model_parallel_world_size(),
        dp_size=int(getattr(args, "dp_size", 1)),
        host=str(args.host),
        port=int(args.port),
        rows_per_pass=rows_per_pass(args),
        no_decode=decode_obstacle(args, str(runner.device)),
    )


def rows_per_pass(args: Any) -> int:
    """Give the most rows of one prefill pass: a chunk, or a whole batch where chunks are off."""
    chunk = int(getattr(args, "chunked_prefill_size", None) or -1)
    return chunk if chunk > 0 else int(getattr(args, "max_prefill_tokens", None) or 16_384)


def decode_obstacle(args: Any, device: str) -> str:
    """Say what hides decode steps from the tap, or give an empty text."""
    backend = getattr(getattr(getattr(args, "cuda_graph_config", None), "decode", None), "backend", None)
    disabled = getattr(args, "disable_cuda_graph", False) or str(getattr(backend, "value", backend)) == "disabled"
    if device == "cpu" or disabled:
        return ""
    return (
        "decode steps run inside a CUDA graph, where no Python sees their rows; for this measurement start the server "
        "with --disable-cuda-graph (newer spelling: --cuda-graph-backend-decode=disabled)"
    )


_ROWS_SHARDED = (
    "enable_dp_attention",
    "enable_layernorm_sp",
    "enable_prefill_cp",
    "enable_prefill_context_parallel",
    "enable_nsa_prefill_context_parallel",
)
"""Settings under which a rank's tensors at the logits processor do not hold the whole batch in order."""


def conflict(runner: Any) -> str | None:
    """Name the server setting under which rows would be wrong or missing, or give None.

    Refusing is the whole point: each of these would produce states that look fine.
    """
    args = runner.server_args
    if getattr(args, "speculative_algorithm", None):
        return f"--speculative-algorithm {args.speculative_algorithm}: the drafter already owns the auxiliary states"
    if getattr(args, "enable_return_aux_hidden_states", False):
        return "--enable-return-aux-hidden-states: SGLang's own capture already owns the auxiliary states"
    if int(getattr(args, "pp_size", 1)) > 1:
        return f"--pp-size {args.pp_size}: the layers of one token live in several processes"
    sharded = [f"--{name.replace('_', '-')}" for name in _ROWS_SHARDED if getattr(args, name, False)]
    if int(getattr(args, "attn_cp_size", 1) or 1) > 1:
        sharded.append(f"--attn-cp-size {args.attn_cp_size}")
    if sharded:
        return f"{', '.join(sharded)}: the rows of a batch are spread over ranks"
    if getattr(args, "disaggregation_mode", "null") not in (None, "null"):
        return f"--disaggregation-mode {args.disaggregation_mode}"
    return None
