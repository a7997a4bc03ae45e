"""Runs whose states are written elsewhere: collectors over HTTP, and a Ray cluster."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace

import typer

from hsdump.cli.watching import Watch, run_session
from hsdump.engines.base import Engine
from hsdump.engines.collector import CollectorEngine, HttpTransport
from hsdump.errors import UsageError
from hsdump.extract.on_ray import start_on_ray, stop_ray
from hsdump.extract.plan import ExtractOptions, check_output
from hsdump.extract.session import Endpoint
from hsdump.extract.state import RunState
from hsdump.store.surgery import SurgeryOptions, merge

COMMIT_S = 5.0
"""A collector's commits are what frees its share of the work, so they come at least so often."""


def run_collectors(urls: Sequence[str], options: ExtractOptions, watch: Watch) -> RunState:
    """Run through collectors that somebody started beside the servers.

    Raises:
        UsageError: no token.
    """
    token = os.environ.get("HSDUMP_COLLECT_TOKEN", "")
    if not token:
        raise UsageError("--collector needs a token", "set HSDUMP_COLLECT_TOKEN to what hsdump collect was given")
    engines: dict[str, Engine] = {
        url.rstrip("/"): CollectorEngine(HttpTransport(url.rstrip("/"), token)) for url in urls
    }
    state = asyncio.run(run_session(engines, _often(options), watch))
    parts = [
        engine.begun.partition for engine in engines.values() if isinstance(engine, CollectorEngine) and engine.begun
    ]
    state.partitions = parts
    if not watch.quiet:
        typer.echo(f"partitions: {', '.join(parts)}\njoin them: hsdump store merge PARTITION... --out STORE", err=True)
    return state


def run_on_ray(address: str, endpoints: list[Endpoint], options: ExtractOptions, watch: Watch) -> RunState:
    """Run on a Ray cluster, and merge the partitions where this host sees all of them.

    Raises:
        UsageError: see `start_on_ray`.
    """
    check_output(options.out)
    # Ray writes its own news, such as the death of an actor, to standard output, where a script reads the report.
    with redirect_stdout(sys.stderr):
        run = start_on_ray(address, endpoints, options.out)
        try:
            engines: dict[str, Engine] = dict(run.engines)
            state = asyncio.run(run_session(engines, _often(options), watch))
        finally:
            stop_ray()
    parts = list(run.partitions.values())
    state.partitions = [str(part) for part in parts]
    if all((part / "manifest.json").is_file() for part in parts):
        merge(parts, options.out, SurgeryOptions())
    elif not watch.quiet:
        typer.echo("the partitions are on their nodes; copy them together and use hsdump store merge", err=True)
    return state


def _often(options: ExtractOptions) -> ExtractOptions:
    return replace(options, commit_s=min(options.commit_s, COMMIT_S))
