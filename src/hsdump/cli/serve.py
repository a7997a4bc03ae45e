"""`hsdump serve`: the user's own SGLang, with capture on."""

from __future__ import annotations

import sys
from dataclasses import replace

import typer

from hsdump.cli.serving import (
    HandOver,
    Layers,
    Python,
    SglangArgs,
    Spool,
    SpoolBytes,
    StagingBytes,
    check_serving,
)
from hsdump.launch.command import ServeOptions, build_command, check_environment
from hsdump.launch.supervise import run_server
from hsdump.spool.names import DEFAULT_SPOOL_BYTES, new_spool_dir
from hsdump.spool.sweep import sweep_dead_spools

EPILOG = "Example:  hsdump serve --layers auto -- --model-path /models/Kimi-K2.5 --tp 8 --port 30000"


def add_to(app: typer.Typer) -> None:
    app.command(epilog=EPILOG, context_settings={"allow_interspersed_args": False})(serve)


def serve(
    sglang_args: SglangArgs = None,
    layers: Layers = "auto",
    spool: Spool = None,
    spool_bytes: SpoolBytes = DEFAULT_SPOOL_BYTES,
    staging_bytes: StagingBytes = None,
    hand_over: HandOver = "auto",
    python: Python = sys.executable,
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
