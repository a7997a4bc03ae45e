"""`hsdump serve`: the user's own SGLang, with capture on."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import typer

from hsdump.errors import UsageError
from hsdump.launch.command import ServeOptions, build_command, check_environment
from hsdump.launch.supervise import run_server
from hsdump.layers import parse_native, resolve_layers
from hsdump.spool.names import new_spool_dir
from hsdump.spool.sweep import sweep_dead_spools

MANY_LAYERS = 1 << 20
"""The model's depth is not known yet; its server checks again."""

EPILOG = "Example:  hsdump serve --layers auto -- --model-path /models/Kimi-K2.5 --tp 8 --port 30000"


def check_serving(layers: str, hand_over: str) -> None:
    """Refuse words that no server could start with, before one is started.

    Raises:
        UsageError: names what is not known.
    """
    if parse_native(layers) is None:
        resolve_layers(layers, MANY_LAYERS)
    if hand_over not in ("auto", "files", "ring"):
        raise UsageError(f"--hand-over {hand_over} is not known", "use auto, files or ring")


def add_to(app: typer.Typer) -> None:
    app.command(epilog=EPILOG, context_settings={"allow_interspersed_args": False})(serve)


def serve(
    sglang_args: list[str] = typer.Argument(None, metavar="-- SGLANG_ARGS...", help="Your own SGLang arguments."),
    layers: str = typer.Option(
        "auto",
        help="Auxiliary layers as indices into transformers' output_hidden_states, auto (EAGLE-3's), all, or "
        "native:i,j,k (ids in the engine's own meaning).",
    ),
    spool: Path = typer.Option(None, help="Hand-over folder in shared memory.  [default: a fresh /dev/shm/hsdump-*]"),
    spool_bytes: int = typer.Option(8 << 30, min=1 << 20, help="The server refuses captures beyond this many bytes."),
    staging_bytes: int = typer.Option(
        None, min=1 << 20, help="GPU memory that rows pass through, in each copying process.  [default: 380 MB at most]"
    ),
    hand_over: str = typer.Option("auto", help="files, ring, or auto: files on a CPU, a ring on an accelerator."),
    python: str = typer.Option(sys.executable, help="Interpreter of the environment that SGLang lives in."),
    print_: bool = typer.Option(False, "--print", help="Print the command and environment instead of starting it."),
) -> None:
    """Start SGLang with capture on; everything after -- is passed on as it is."""
    check_serving(layers, hand_over)
    options = ServeOptions(
        python=python,
        spool=spool or new_spool_dir(),
        layers=layers,
        spool_bytes=spool_bytes,
        hand_over=hand_over,
        staging_bytes=staging_bytes,
        sglang_args=tuple(sglang_args or ()),
    )
    command = build_command(options)
    if print_:
        typer.echo(command.as_shell())
        return
    version, attach = check_environment(python)
    options = replace(options, attach=attach)
    command = build_command(options)
    swept = sweep_dead_spools()
    if swept.spools:
        typer.echo(f"hsdump: removed {len(swept.spools)} spools of dead servers, {swept.num_bytes} bytes", err=True)
    typer.echo(f"hsdump: SGLang {version} by {attach}, spool {options.spool}", err=True)
    raise typer.Exit(run_server(options, command))
