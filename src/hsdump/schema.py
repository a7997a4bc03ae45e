"""Records that more than one part of hsdump exchanges. Standard library only: the server side imports them.

Letters: S = tokens of one sample, L = auxiliary layers, H = hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from hsdump.layers import state_names

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes per element of the dtypes that states can have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateShape:
    """What one token leaves behind: L auxiliary states and the final one, or both final ones."""

    layers: tuple[int, ...]
    """[L] ascending ids in hsdump's meaning (`hsdump.layers`)."""

    hidden_size: int

    dtype: str
    """`bfloat16`, `float16` or `float32`: the model's own, never converted."""

    final_state: str
    """`post_norm` (what the lm_head reads), `pre_norm`, or `both`. Same shape, other numbers: never mixed."""

    @property
    def names(self) -> tuple[str, ...]:
        """[L+1] names in storage order, `layer2 ... final`; with both final states [L+2], `final_pre_norm` last."""
        return state_names(self.layers, self.final_state)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one state."""
        return self.hidden_size * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all states (57,344 for Kimi-K2.5 with three layers)."""
        return self.row_bytes * len(self.names)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What is really on at the other end: the answer of a handshake."""

    engine: str
    """`sglang` or `transformers`."""

    engine_version: str

    attach: str
    """`plugin`, `patch` or `embedded`."""

    hsdump_version: str
    """Of the code that runs beside the model, which may differ from the client's."""

    model_path: str

    model_class: str

    num_layers: int

    vocab_size: int

    context_length: int
    """Most tokens of one request."""

    shape: StateShape

    device: str

    tp_size: int = 1

    dp_size: int = 1

    spool_dir: str | None = None
    """Where finished entries appear; None for an embedded engine."""

    spool_max_bytes: int | None = None
    """The server refuses captures beyond this."""

    hand_over: str = "files"
    """`files` (one a request), `ring` (one a capturing process), or `memory` for an embedded engine."""

    rings: int = 0
    """Rings that one server has: its capturing processes, when `hand_over` is `ring`."""

    engine_layers: tuple[int, ...] = ()
    """The same layers in the engine's own meaning, as its setter took them on the loaded model; empty where it has no
    way to say them. They belong into the config of a drafter for this engine."""

    no_decode: str = "this engine does not generate"
    """Why rows of decode steps cannot be captured; empty where they can."""

    notes: tuple[str, ...] = ()
    """Facts that a reader should know, such as an SGLang release that hsdump has not seen before."""
