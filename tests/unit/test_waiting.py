"""A store that is slower than its servers: what is answered waits, and nothing of it is lost or taken for another."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hsdump.cli.watching import Watch, run_session
from hsdump.engines.base import CapturedSample, CaptureFailed, CaptureRequest, ServerAway
from hsdump.extract import driver, lanes
from hsdump.extract.disk import DiskFull, DiskGuard
from hsdump.extract.keeper import Keeper
from hsdump.extract.plan import ExtractOptions
from hsdump.extract.state import RunState
from hsdump.schema import EngineInfo
from hsdump.spool.entry import entry_bytes
from hsdump.store import Store
from tests.unit.test_driver import INFO, SHAPE, ScriptedEngine, rows_file, run

LARGE = 100_000.0
"""Samples in half of a spool: more than there are."""


def with_spool(samples_in_half: float | None) -> EngineInfo:
    """Give a server whose spool lets so many samples wait."""
    each = entry_bytes(SHAPE, 3)
    return replace(INFO, spool_max_bytes=samples_in_half and int(2 * samples_in_half * each / lanes.SPOOL_SHARE))


def slow_store(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have each sample take so long on its way into the store."""
    keep = Keeper.keep

    async def slow(self: Keeper, *what: Any) -> None:
        await asyncio.sleep(seconds)
        await keep(self, *what)

    monkeypatch.setattr(Keeper, "keep", slow)


class Counting(ScriptedEngine):
    """Counts what is given back."""

    released = 0

    async def capture(self, request: CaptureRequest) -> CapturedSample:
        def release() -> None:
            self.released += 1

        return replace(await super().capture(request), release=release)


@pytest.mark.parametrize(
    ("in_half", "least", "most"),
    [(None, 3, 3), (5.5, 6, 8), (100, 20 + 3, 20 + 3)],
    ids=["no spool", "small spool", "small samples"],
)
def test_a_server_goes_on_while_the_store_stands_still_until_half_of_its_spool_waits(
    in_half: float | None, least: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine(info=with_spool(in_half))
    keep, stands_still = Keeper.keep, asyncio.Event()

    async def late(self: Keeper, *what: Any) -> None:
        before = -1
        while not stands_still.is_set() and before != len(engine.sent):
            before = len(engine.sent)
            await asyncio.sleep(0.5)
        stands_still.set()
        await keep(self, *what)

    async def run_it() -> RunState:
        rows = rows_file(tmp_path, 40)
        options = ExtractOptions(inputs=(rows,), out=tmp_path / "store", disk_reserve=0, concurrency=3)
        running = asyncio.create_task(run_session({"a": engine}, options, Watch(quiet=True)))
        await asyncio.wait_for(stands_still.wait(), 30)
        assert least <= len(engine.sent) <= most
        return await running

    monkeypatch.setattr(Keeper, "keep", late)
    monkeypatch.setattr(driver, "MOST_WAITING", 20)
    state = asyncio.run(run_it())
    assert (state.exit_code(), state.committed, engine.most_together) == (0, 40, 3)
    assert state.lanes[0].in_flight == state.lanes[0].in_flight_bytes == state.in_flight == 0


def test_what_waits_is_committed_when_the_disk_has_no_room_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = []

    def check(_guard: DiskGuard, num_bytes: int, _state: RunState) -> None:
        checks.append(num_bytes)
        if len(checks) > 200:
            raise DiskFull("full", "make room")

    engine = Counting(info=with_spool(LARGE))
    slow_store(monkeypatch, 0.05)
    monkeypatch.setattr(DiskGuard, "check", check)
    state = run(tmp_path, {"a": engine}, count=300)
    assert state.exit_code() == 4
    assert state.committed == len(engine.sent) == engine.released >= 200 - 16


def test_a_dead_server_is_not_lost_while_what_it_answered_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(request: CaptureRequest, before: int) -> None:
        if request.input_ids[2] == 7 + 150 and not before:
            engine.lost = True
        if engine.lost:
            raise ServerAway("gone")

    class Returning(ScriptedEngine):
        async def reconnect(self) -> EngineInfo:
            assert not state_of.in_flight_bytes, "the old server's memory is still held"
            return await super().reconnect()

    engine = Returning(die, with_spool(LARGE))
    state_of = lanes.LaneState(name="a")
    monkeypatch.setattr(lanes, "LaneState", lambda **_facts: state_of)
    monkeypatch.setattr(lanes, "FIRST_PAUSE_S", 2.0)  # more than it may be away: it is asked at once
    slow_store(monkeypatch, 0.2)
    state = run(tmp_path, {"a": engine}, count=300, server_wait_s=0.5)
    assert (state.exit_code(), state.committed, state_of.deaths) == (0, 300, 1)


def test_a_server_that_answers_is_not_ill_because_the_store_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_at_times(request: CaptureRequest, before: int) -> None:
        if request.input_ids[2] % 20 == 0 and not before:
            raise CaptureFailed("server-error", "HTTP 503", transient=True)

    went: list[str] = []
    monkeypatch.setattr(lanes.Lane, "went", lambda _lane, status, _detail: went.append(status))
    slow_store(monkeypatch, 0.3)
    state = run(tmp_path, {"a": ScriptedEngine(fail_at_times, with_spool(LARGE))}, count=250)
    assert (state.exit_code(), state.committed, went) == (0, 250, [])


def test_what_waits_is_noted_as_captured_and_given_back_when_the_run_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Counting(info=with_spool(LARGE))
    slow_store(monkeypatch, 60)
    monkeypatch.setattr(driver, "MOST_WAITING", 50)

    async def run_a_while() -> RunState:
        options = ExtractOptions(inputs=(rows_file(tmp_path, 100),), out=tmp_path / "store", disk_reserve=0)
        running = asyncio.create_task(run_session({"a": engine}, options, Watch(quiet=True)))
        while True:
            await asyncio.sleep(0.5)
            if len(engine.sent) == 50 + 16:
                with Store(tmp_path / "store") as store:
                    noted = [row.state for row in store.requests()]
                if noted.count("captured") == 50 + 16:
                    break
        assert noted.count("sent") == 0
        running.cancel()
        return await running

    state = asyncio.run(asyncio.wait_for(run_a_while(), 60))
    assert (state.committed, state.waiting, state.in_flight) == (0, 0, 0)
    assert len(engine.sent) == 50 + 16
    assert engine.released >= 50  # who was in `keep`, which the test made slow, has it released there


@pytest.mark.parametrize("in_spool", [True, False])
def test_only_what_takes_no_memory_here_gives_its_place_to_another(
    in_spool: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Assembled(ScriptedEngine):
        async def capture(self, request: CaptureRequest) -> CapturedSample:
            return replace(await super().capture(request), in_spool=in_spool)

    engine, seen = Assembled(info=with_spool(LARGE)), []
    keep = Keeper.keep

    async def slow(self: Keeper, *what: Any) -> None:
        await asyncio.sleep(0.3)
        seen.append(len(engine.sent))
        await keep(self, *what)

    monkeypatch.setattr(Keeper, "keep", slow)
    assert run(tmp_path, {"a": engine}, count=40, concurrency=4).committed == 40
    assert (seen[0] == 40) if in_spool else (seen[0] <= 4)


def test_the_next_rows_are_read_while_the_first_are_at_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes, take = [], driver._take

    def noted(*what: Any) -> Any:
        takes.append(what)
        return take(*what)

    class Waiting(ScriptedEngine):
        async def capture(self, request: CaptureRequest) -> CapturedSample:
            while len(takes) < 2:
                await asyncio.sleep(0.01)
            return await super().capture(request)

    monkeypatch.setattr(driver, "_take", noted)
    options = ExtractOptions(inputs=(rows_file(tmp_path, 150),), out=tmp_path / "store", disk_reserve=0, concurrency=1)
    running = run_session({"a": Waiting()}, options, Watch(quiet=True))
    state = asyncio.run(asyncio.wait_for(running, 60))
    assert (state.committed, len(takes)) == (150, 4)
