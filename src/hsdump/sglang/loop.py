"""The tap inside a model's own forward loop, for forks whose logits processor never sees the auxiliary states.

Layers and final state are taken where the model computes them; nothing of SGLang's own capture is switched on.
Letters: T = rows of the batch, H = hidden size.
"""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import torch

from hsdump.capture.batch import BatchStates, Segment, segments_of
from hsdump.sglang.facts import RunnerFacts, conflict, rows_per_pass
from hsdump.sglang.hooks import ServerCapture, wanted_layers
from hsdump.spool.names import PREFIX

logger = logging.getLogger(__name__)

_TWO_BATCHES = ("enable_two_batch_overlap", "enable_single_batch_overlap")
_PREFILL_GRAPHS = ("enable_piecewise_cuda_graph", "enable_breakable_cuda_graph", "enable_torch_compile")


class CannotTap(Exception):
    """This server's forward loop does not pass every row through Python; says why."""


class LoopCapture:
    """The tap of one model class. Its methods are called by blocks in the model's file, and never raise."""

    def __init__(self, capture: ServerCapture) -> None:
        self._capture = capture
        self._layers: tuple[int, ...] = ()

    def after_init(self, model: Any, config: Any) -> None:
        """Announce capture when SGLang has built its model, or announce why there is none.

        Args:
            config: what the model was built from. Not each keeps it: DeepseekV2Model of 0.5.9 does not.
        """
        host, port = "", 0
        try:
            args = _server_args()
            host, port = str(args.host), int(args.port)
            reason = conflict(SimpleNamespace(server_args=args)) or _loop_conflict(args)
            if reason:
                raise CannotTap(f"the tap in the forward loop cannot be combined with {reason}")
            facts = _facts(model, config, args)
            layers = wanted_layers(facts.num_layers)
            self._capture._open(facts, layers)
            self._layers = layers
        except Exception as error:  # noqa: BLE001 - a process border: the server must start whatever is wrong with us
            self._capture.give_up(f"{type(error).__name__}: {error}", host=host, port=port)

    def begin(self, input_ids: Any, batch: Any) -> Pass | None:
        """Look for hsdump's rows in a batch; None for every batch without any, and for decoding."""
        if self._capture._tap is None or not self._layers:
            return None
        try:
            if not batch.forward_mode.is_extend() or batch.rids is None:
                return None
            if not any(rid.startswith(PREFIX) for rid in batch.rids):
                return None
            segments = segments_of(batch.rids, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu)
            return Pass(self._capture._tap, self._layers, segments, input_ids) if segments else None
        except Exception:  # a process border, as above
            logger.exception("hsdump could not read a batch; its requests are not captured")
            return None


class Pass:
    """One pass through the loop that holds rows of ours."""

    def __init__(self, tap: Any, layers: tuple[int, ...], segments: list[Segment], input_ids: torch.Tensor) -> None:
        self._tap, self._layers, self._segments, self._input_ids = tap, layers, segments, input_ids
        self._aux: dict[int, torch.Tensor] = {}

    def layer(self, index: int, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Keep the input of layer `index`, when it is wanted; called before the layer runs.

        The sum is a new tensor: layers go on to write into both of its terms.
        """
        if index in self._layers:
            try:
                self._aux[index] = hidden_states.clone() if residual is None else hidden_states + residual
            except Exception:  # a process border, as above
                logger.exception("hsdump could not keep layer %s", index)

    def final(self, hidden_states: torch.Tensor) -> None:
        """Take the rows: the final state is the norm's output."""
        try:
            missing = [layer for layer in self._layers if layer not in self._aux]
            if missing:
                raise ValueError(f"the loop did not pass layers {missing}")
            aux = [self._aux[layer] for layer in self._layers]
            self._tap.take(self._segments, BatchStates(self._input_ids, aux, hidden_states))
            self._tap.settle()
        except Exception as error:  # a process border, as above
            logger.exception("hsdump could not capture a batch")
            with contextlib.suppress(Exception):  # a process border, as above
                self._tap.refuse(self._segments, "capture-error", f"{type(error).__name__}: {error}")


def _server_args() -> Any:
    from sglang.srt.server_args import get_global_server_args

    return get_global_server_args()


def _loop_conflict(args: Any) -> str | None:
    """Name a setting under which some rows pass outside the loop, or the loop does not run in Python."""
    for name in (*_TWO_BATCHES, *_PREFILL_GRAPHS):
        if getattr(args, name, False):
            return f"--{name.replace('_', '-')}"
    # 0.5.10 turned the option round. On a CPU there are no graphs, whatever it says.
    if args.device != "cpu" and getattr(args, "disable_piecewise_cuda_graph", True) is False:
        return "prefill under a CUDA graph (start with --disable-piecewise-cuda-graph)"
    return None


def _facts(model: Any, config: Any, args: Any) -> RunnerFacts:
    """Read what the general way reads from the ModelRunner, of which a model knows nothing."""
    from sglang.srt.distributed.parallel_state import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    config = getattr(model, "config", config)
    context = getattr(config, "context_len", None) or config.max_position_embeddings
    return RunnerFacts(
        model_path=str(args.model_path),
        model_class=type(model).__name__,
        num_layers=int(config.num_hidden_layers),
        hidden_size=int(config.hidden_size),
        vocab_size=int(config.vocab_size),
        context_length=int(context),
        dtype=str(torch.get_default_dtype()).removeprefix("torch."),
        device=str(args.device),
        tp_rank=get_tensor_model_parallel_rank(),
        tp_size=get_tensor_model_parallel_world_size(),
        dp_size=int(getattr(args, "dp_size", 1)),
        host=str(args.host),
        port=int(args.port),
        rows_per_pass=rows_per_pass(args),
        no_decode="the tap in the forward loop takes prefill only",
    )
