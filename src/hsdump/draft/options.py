"""What a training can be told."""

from __future__ import annotations

from typing import Literal

import msgspec

from hsdump.draft.config import Widths


class TrainOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one training. A resume takes the same ones; `RESUME_FREE` may differ."""

    layers: list[int] | None = None
    """Auxiliary layers in hsdump's meaning; None: all that the store has."""

    widths: Widths = Widths()
    ttt_steps: int = 7
    step_decay: float = 0.8
    """Weight of each further step, as in the paper's code."""

    loss: str = "kl"
    tokens: int = 4096
    """Of a batch on one device; samples are packed up to it, none is cut."""

    accumulate: int = 1
    epochs: int = 10
    max_steps: int | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = 1e-3
    min_lr_share: float = 0.1
    warmup: int = 50
    weight_decay: float = 0.0
    clip: float = 0.5
    seed: int = 0
    held_out: float = 0.05
    eval_tokens: int = 3
    """Draft tokens that the acceptance length is reckoned with."""

    validate_every: int = 200
    save_every: int = 200
    patience: int = 0
    """Validations without a better acceptance length after which training ends; 0: never."""

    precision: Literal["auto", "bf16", "fp32"] = "auto"
    device: str = "auto"
    workers: int = 0
    attention: Literal["auto", "dense", "flex"] = "auto"
    fsdp: bool = False
    tensorboard: bool = False
    skip_longer: bool = False
    log_every: int = 10


RESUME_FREE = frozenset(("workers", "device", "tensorboard", "log_every", "save_every"))
"""Settings that do not change what is learned."""
