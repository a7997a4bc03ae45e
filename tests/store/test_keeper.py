"""What a run's keeper does with the memory of a sample, and with the store's threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from hsdump.engines.base import CapturedSample
from hsdump.errors import StoreError
from hsdump.extract.keeper import Keeper
from hsdump.extract.plan import ExtractOptions, ExtractPlan
from hsdump.extract.state import RunState
from hsdump.store import Store, StoreWriter, WriterOptions, shard_writer, side_by_side
from tests.store.faults import FaultyFs
from tests.store.making import Made, assert_holds, make_manifest, make_sample

MANIFEST = make_manifest()


def ignore(_kind: str, **_facts: object) -> None:
    """Events are another test's."""


def in_a_loop(test: Callable[[Run], Coroutine[None, None, None]]) -> Callable[[Run], None]:
    @wraps(test)
    def synchronous(run: Run) -> None:
        asyncio.run(test(run))

    return synchronous


@dataclass
class Run:
    """A keeper over a store whose disk the test can stop."""

    path: Path
    fs: FaultyFs = field(default_factory=FaultyFs)
    state: RunState = field(default_factory=RunState)
    released: list[int] = field(default_factory=list)
    commit_s: float = 60.0

    def keeper(self) -> Keeper:
        options = WriterOptions(fs=self.fs, shard_bytes=12_000)
        plan = SimpleNamespace(columns=range(len(MANIFEST.shape.names)), shape=MANIFEST.shape)
        return Keeper(
            lambda: StoreWriter.open(self.path, MANIFEST, options=options),
            cast("ExtractPlan", plan),
            cast("ExtractOptions", SimpleNamespace(commit_s=self.commit_s)),
            self.state,
            ignore,
        )

    def captured(self, number: int, made: Made) -> CapturedSample:
        states = tuple(state.copy() for state in made.states)

        def release() -> None:
            self.released.append(number)
            for state in states:
                state.fill(1)  # the ring's memory has other rows now

        ids = np.asarray(made.sample.input_ids)
        return CapturedSample(token_ids=ids, states=states, release=release, meta={})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(side_by_side, "SMALL_BYTES", 0)
    monkeypatch.setattr(shard_writer, "BUFFER_BYTES", 1000)
    return Run(tmp_path / "store")


def made_of(count: int) -> list[Made]:
    return [make_sample(seed, MANIFEST, num_tokens=45) for seed in range(count)]


def keeping(run: Run, keeper: Keeper, made: list[Made]) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(keeper.keep(one.sample, run.captured(n, one), 1)) for n, one in enumerate(made)]


async def cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until(done: Callable[[], bool]) -> None:
    for _ in range(6000):
        if done():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never happened")


@in_a_loop
async def test_samples_are_kept_side_by_side_and_released_when_written(run: Run) -> None:
    made, keeper = made_of(20), run.keeper()
    await keeper.open()
    twice = [*made, made[0]]
    await asyncio.gather(*(keeper.keep(one.sample, run.captured(n, one), 1) for n, one in enumerate(twice)))
    assert sorted(run.released) == list(range(21))
    assert all(keeper.committed(one.sample.key) for one in made)
    await keeper.close()
    keeper.shut_down()
    assert (run.state.committed, run.state.already) == (20, 1)
    assert_holds(run.path, made)


@in_a_loop
async def test_cancelled_wait_frees_nothing_that_is_being_written(run: Run) -> None:
    made, keeper = made_of(4), run.keeper()
    await keeper.open()
    run.fs.fill_gate.clear()
    tasks = keeping(run, keeper, made)
    await until(lambda: all(keeper.committed(one.sample.key) for one in made))
    await cancel(tasks)
    assert run.released == []
    run.fs.fill_gate.set()
    await keeper.close()
    keeper.shut_down()
    assert sorted(run.released) == list(range(4))
    assert_holds(run.path, made)


@in_a_loop
async def test_a_slow_commit_holds_samples_back_and_nothing_else(run: Run) -> None:
    run.commit_s = 0.0
    made, keeper = made_of(12), run.keeper()
    await keeper.open()
    run.fs.gate.clear()
    tasks = []
    for number, one in enumerate(made):
        tasks.append(asyncio.create_task(keeper.keep(one.sample, run.captured(number, one), 1)))
        await asyncio.wait(tasks[-1:], timeout=0.3)
    assert tasks[1].done()
    assert not tasks[-1].done()  # the first commit is under way, and enough is there for the next one
    keeper.note(made[-1].sample, "sent", "an-id")
    await asyncio.wait_for(keeper.tick(), 5)
    await asyncio.wait_for(keeper.fail(make_sample(99, MANIFEST, num_tokens=45).sample, "reason", "", attempts=1), 5)
    run.fs.gate.set()
    await asyncio.gather(*tasks)
    await keeper.close()
    keeper.shut_down()
    assert run.state.committed == 12
    assert_holds(run.path, made)


@in_a_loop
async def test_an_index_that_waits_for_the_disk_holds_no_sample_back(run: Run) -> None:
    made, keeper = made_of(4), run.keeper()
    await keeper.open()
    run.fs.note_gate.clear()
    keeper.note(made[0].sample, "sent", "an-id")
    failing = keeper.fail(make_sample(99, MANIFEST, num_tokens=45).sample, "reason", "", attempts=1)
    waiting = [asyncio.create_task(keeper.tick()), asyncio.create_task(failing)]
    await asyncio.wait_for(asyncio.gather(*keeping(run, keeper, made)), 30)
    assert sorted(run.released) == list(range(4))
    assert not any(task.done() for task in waiting)
    run.fs.note_gate.set()
    await asyncio.gather(*waiting)
    await keeper.close()
    keeper.shut_down()
    assert (run.state.committed, run.state.failed) == (4, {"reason": 1})
    assert_holds(run.path, made)


@in_a_loop
async def test_a_sample_that_is_committed_or_failed_has_no_note_any_more(run: Run) -> None:
    run.commit_s = 0.0
    made, keeper = made_of(3), run.keeper()
    await keeper.open()
    await keeper.keep(made[0].sample, run.captured(0, made[0]), 1)
    await until(lambda: keeper.is_safe(made[0].sample.key))
    for one in made:
        keeper.note(one.sample, "captured")  # of the first as if its commit had come while it was written
    run.fs.note_gate.clear()
    failing = asyncio.create_task(keeper.fail(made[1].sample, "reason", "", attempts=1))
    ticking = asyncio.create_task(keeper.tick())
    await asyncio.sleep(0.05)
    run.fs.note_gate.set()
    await asyncio.gather(ticking, failing)
    with Store(run.path) as store:
        assert [row.key for row in store.requests()] == [made[2].sample.key]
    await keeper.close()
    keeper.shut_down()
    with Store(run.path) as store:
        assert store.requests() == []


@in_a_loop
async def test_cancelled_before_its_turn_is_released_all_the_same(run: Run) -> None:
    made, keeper = made_of(12), run.keeper()
    await keeper.open()
    run.fs.fill_gate.clear()
    tasks = keeping(run, keeper, made)
    # Four threads with two samples each; the store's thread waits with the ninth, and the others wait for it.
    await until(lambda: sum(keeper.committed(one.sample.key) for one in made) == 8)
    await asyncio.sleep(0.1)
    await cancel(tasks)
    assert len(run.released) >= 3
    run.fs.fill_gate.set()
    await keeper.close()
    keeper.shut_down()
    assert sorted(run.released) == list(range(12))


@in_a_loop
async def test_a_write_that_fails_reaches_who_waits(run: Run) -> None:
    made, keeper = made_of(6), run.keeper()
    await keeper.open()
    run.fs.kind, run.fs.fuse = "error", run.fs.operations + 5
    keeps = (keeper.keep(one.sample, run.captured(n, one), 1) for n, one in enumerate(made))
    errors = await asyncio.gather(*keeps, return_exceptions=True)
    assert any(isinstance(error, StoreError) for error in errors)
    with pytest.raises(StoreError):
        await keeper.close()
    keeper.shut_down()
    assert sorted(run.released) == list(range(6))
    assert not run.fs.open_files
