"""What `hsdump serve` and `hsdump run` have in common: options of a server that captures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hsdump.errors import UsageError
from hsdump.layers import parse_native, resolve_layers

MANY_LAYERS = 1 << 20
"""The model's depth is not known yet; its server checks again."""

SglangArgs = Annotated[list[str] | None, typer.Argument(metavar="-- SGLANG_ARGS...", help="Your own SGLang arguments.")]
Python = Annotated[str, typer.Option(help="Interpreter of the environment that SGLang lives in.")]
Layers = Annotated[
    str,
    typer.Option(
        help="Auxiliary layers as indices into transformers' output_hidden_states, auto (EAGLE-3's), all, or "
        "native:i,j,k (ids in the engine's own meaning)."
    ),
]
Spool = Annotated[
    Path | None, typer.Option(show_default="a fresh /dev/shm/hsdump-*", help="Hand-over folder in shared memory.")
]
SpoolBytes = Annotated[int, typer.Option(min=1 << 20, help="The server refuses captures beyond this many bytes.")]
StagingBytes = Annotated[
    int | None,
    typer.Option(
        min=1 << 20, show_default="380 MB at most", help="GPU memory that rows pass through, in each copying process."
    ),
]
HandOver = Annotated[str, typer.Option(help="files, ring, or auto: files on a CPU, a ring on an accelerator.")]


def check_serving(layers: str, hand_over: str) -> None:
    """Refuse words that no server could start with, before one is started.

    Raises:
        UsageError: names what is not known.
    """
    if parse_native(layers) is None:
        resolve_layers(layers, MANY_LAYERS)
    if hand_over not in ("auto", "files", "ring"):
        raise UsageError(f"--hand-over {hand_over} is not known", "use auto, files or ring")
