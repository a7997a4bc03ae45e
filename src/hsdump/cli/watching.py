"""A run at a terminal: what is shown, what is logged, and what Ctrl-C does."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer

from hsdump.engines.base import Engine
from hsdump.engines.collector import CollectorEngine
from hsdump.extract.display import greeting, live_panel, say_event
from hsdump.extract.driver import Driver
from hsdump.extract.events import Events, JsonLog
from hsdump.extract.heartbeat import Heartbeat
from hsdump.extract.plan import ExtractOptions, make_plan
from hsdump.extract.prometheus import serve_metrics
from hsdump.extract.session import begin_collecting, limits_of, make_session, shake_hands
from hsdump.extract.state import RunState
from hsdump.live import LivePanel

PROGRESS_EVERY = 5
"""Seconds between two `progress` events."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """How a run is to be seen."""

    quiet: bool = False
    json_log: Path | None = None
    metrics_port: int | None = None


async def run_session(engines: dict[str, Engine], options: ExtractOptions, watch: Watch) -> RunState:
    """Shake hands, run, and let go of everything, however it ends.

    Raises:
        HsdumpError: before the first sample was sent; later ones are in the state.
    """
    fleet = None
    try:
        collectors = any(isinstance(engine, CollectorEngine) for engine in engines.values())
        lanes, info = await shake_hands(engines, limits_of(options, collectors=collectors))
        if not watch.quiet:
            typer.echo(greeting(info), err=True)
            for lane in lanes:
                problem = f"is left out until it answers: {lane.problem.what}" if lane.problem else "is there"
                typer.echo(f"  server {lane.state.name} {problem}", err=True)
        events = Events()
        plan = make_plan(options, info)
        await begin_collecting(lanes, plan, options)
        session = make_session(lanes, plan, options, events)
        fleet = session.fleet
        stop_on_signals(session.driver)
        with ExitStack() as stack:
            display = live_panel(session.state, quiet=watch.quiet)
            events.listeners.append(partial(say_event, display))
            if watch.json_log is not None:
                log = JsonLog(watch.json_log)
                stack.callback(log.close)
                events.listeners.append(log)
            if watch.metrics_port is not None:
                stack.callback(serve_metrics(session.state, watch.metrics_port))
            stack.enter_context(display.shown())
            events("started", store=str(options.out), servers=[lane.state.name for lane in lanes])
            heartbeat = Heartbeat(options.out, session.state)
            ticker = asyncio.create_task(_tick(display, events, session.state))
            beating = asyncio.create_task(_beat(heartbeat))
            try:
                return await session.run()
            except asyncio.CancelledError:  # the second Ctrl-C: the report still says what there is
                return session.state
            finally:
                ticker.cancel()
                beating.cancel()
                heartbeat.last_beat()
    finally:
        if fleet is not None:
            await fleet.close()
        else:
            await asyncio.gather(*(engine.close() for engine in engines.values()))


def stop_on_signals(driver: Driver) -> None:
    """The first Ctrl-C finishes what is in flight and commits; the second ends the run at once, still consistent."""
    loop, main_task = asyncio.get_running_loop(), asyncio.current_task()

    def on_signal() -> None:
        if driver.state.stopped and main_task is not None:
            main_task.cancel()
        driver.stop("interrupted")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)


async def _beat(heartbeat: Heartbeat) -> None:
    while True:
        await asyncio.sleep(1.0)
        await heartbeat.beat()


async def _tick(display: LivePanel, events: Events, state: RunState) -> None:
    seconds = 0
    while True:
        await asyncio.sleep(1.0)
        seconds += 1
        display.tick()
        if seconds % PROGRESS_EVERY == 0:
            servers = [
                {"server": lane.name, "status": lane.status, "in_flight": lane.in_flight, "others": lane.others}
                for lane in state.lanes
            ]
            events(
                "progress",
                committed=state.committed,
                captured=state.captured,
                in_flight=state.in_flight,
                tokens=state.tokens,
                captured_tokens=state.captured_tokens,
                to_do=state.to_do,
                servers=servers,
            )
