"""`hsdump run`: patch, serve, restore, in one command."""

from __future__ import annotations

import sys

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
from hsdump.launch.command import ServeOptions
from hsdump.launch.cycle import run_patched
from hsdump.patch.site import find_site
from hsdump.patch.transaction import ApplyOptions
from hsdump.spool.names import DEFAULT_SPOOL_BYTES, new_spool_dir
from hsdump.spool.sweep import sweep_dead_spools

EPILOG = "Example:  hsdump run --python /opt/sglang/bin/python -- --model-path /models/Kimi-K2.5 --tp 8 --port 30000"


def add_to(app: typer.Typer) -> None:
    app.command(epilog=EPILOG, context_settings={"allow_interspersed_args": False})(run)


def run(
    sglang_args: SglangArgs = None,
    layers: Layers = "auto",
    spool: Spool = None,
    spool_bytes: SpoolBytes = DEFAULT_SPOOL_BYTES,
    staging_bytes: StagingBytes = None,
    hand_over: HandOver = "auto",
    python: Python = sys.executable,
    target: str = typer.Option(None, help="Put the tap into this model file's forward loop: models/deepseek_v2.py."),
    reason: str = typer.Option("", help="Why, for the journal."),
    accept_modified: bool = typer.Option(False, help="Patch files that differ from what was installed."),
    import_check: bool = typer.Option(True, help="Prove that the patched SGLang imports before changing it."),
) -> None:
    """Patch an SGLang without a plugin API, serve with capture on, and restore the source when the server ends.

    Run `hsdump extract` beside it. Ctrl-C ends the server and restores; after a crash, the next `hsdump run` or
    `hsdump detach` restores. With a plugin API (0.5.11 and later) prefer `hsdump serve`, which changes no file.
    """
    check_serving(layers, hand_over)
    serving = ServeOptions(
        python=python,
        spool=spool or new_spool_dir(),
        layers=layers,
        spool_bytes=spool_bytes,
        hand_over=hand_over,
        staging_bytes=staging_bytes,
        sglang_args=tuple(sglang_args or ()),
    )
    applying = ApplyOptions(
        target=target, reason=reason or "hsdump run", accept_modified=accept_modified, import_check=import_check
    )
    site = find_site(python=python)
    sweep_dead_spools()
    typer.echo(f"hsdump: SGLang {site.version} by patch, spool {serving.spool}", err=True)
    raise typer.Exit(run_patched(site, serving, applying, lambda line: typer.echo(f"hsdump: {line}", err=True)))
