"""A writing process is really killed, again and again; what it was promised must be there, and nothing half."""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path

import pytest

from hsdump.store import Store, StoreWriter
from hsdump.verify import verify_store
from tests.store.conftest import PROFILE
from tests.store.kill_child import MANIFEST, sample_of, write_for_ever
from tests.store.making import assert_equal

KILLS = {"dev": 20, "ci": 200, "nightly": 1000}[PROFILE] // 2
"""Of each of the two ways to write."""

MOST_KILLS = 20 * KILLS
"""On a fast disk few kills hit a commit: it goes on until one has left something to recover."""

LONGEST_S = 0.15
"""A child gets through several commits in this time; some are killed while they still open the store."""


@pytest.mark.parametrize("beside", [False, True], ids=["one-shard", "side-by-side"])
def test_kill_9_at_random_moments(tmp_path: Path, beside: bool) -> None:
    path = tmp_path / "store"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.store.kill_child"])
    choose = random.Random(9)
    promised: set[int] = set()
    next_number, recoveries, kills = 0, 0, 0
    longest_s = LONGEST_S * (2 if beside else 1)  # it makes more files, all of which are synced
    while kills < KILLS or (not recoveries and kills < MOST_KILLS):
        kills += 1
        news = _run_and_kill(context, path, next_number, choose.uniform(0, longest_s), beside)
        promised |= news
        attempted = range(next_number, max(news, default=next_number) + 20)
        _check(path, news)
        recoveries += _check_nothing_half(path, attempted)
        next_number = attempted.stop
    assert verify_store(path).verdict == "clean"
    with Store(path, check=True) as store:
        for number in promised:
            assert_equal(store, sample_of(number))
    assert recoveries > 0, "no kill left anything to recover: the test does not test"
    assert len(promised) > kills


def _run_and_kill(
    context: multiprocessing.context.BaseContext, path: Path, first: int, seconds: float, beside: bool
) -> set[int]:
    """Give the numbers of the samples that the child said were committed."""
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=write_for_ever, args=(path, first, there, beside))  # type: ignore[attr-defined]  # not in its base
    child.start()
    there.close()
    if seconds > LONGEST_S / 5:
        assert here.poll(60), "the child did not open the store"
    time.sleep(seconds)
    child.kill()
    child.join()
    assert child.exitcode == -9, child.exitcode
    news: set[int] = set()
    try:
        while True:
            message = here.recv()
            if message != "open":
                news |= set(range(*message))
    except EOFError:
        pass
    return news


def _check(path: Path, news: set[int]) -> None:
    """A reader right after the kill, before anybody recovers."""
    if not (path / "manifest.json").exists():
        assert not news
        return
    with Store(path, check=True) as store:
        for number in news:
            assert_equal(store, sample_of(number))


def _check_nothing_half(path: Path, attempted: range) -> int:
    """Recover, then look at what the child was at when it died; gives the number of things put in order."""
    with StoreWriter.open(path, MANIFEST) as writer:
        recovered = len(writer.recovered)
    with Store(path, check=True) as store:
        for number in attempted:
            made = sample_of(number)
            if made.sample.key in store:
                assert_equal(store, made)
    assert not list(path.glob("**/*.partial"))
    assert not (path / "quarantine").exists()
    return recovered
