"""The process that `test_kill.py` kills: adds and commits for ever, and tells which keys were promised."""

from __future__ import annotations

import random
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path

from hsdump.store import StoreWriter, WriterOptions, side_by_side
from tests.store.making import Made, make_manifest, make_sample

LARGE_TOKENS = 100_000
"""4.8 MB of states: beyond what a shard keeps in memory."""

MANIFEST = make_manifest(max_tokens=LARGE_TOKENS)


def sample_of(number: int) -> Made:
    """Every fortieth sample is large; none is so short that two of thousands are the same."""
    return make_sample(number, MANIFEST, num_tokens=LARGE_TOKENS if number % 40 == 39 else 5 + number % 30)


def write_for_ever(path: Path, first: int, pipe: Connection, beside: bool) -> None:
    """Send the numbers of samples after each commit.

    Args:
        beside: samples are written by threads, into several shards at a time.
    """
    choose = random.Random(first)
    side_by_side.SMALL_BYTES = 0  # else the small ones would not go to threads
    with StoreWriter.open(path, MANIFEST, options=WriterOptions(shard_bytes=3000)) as writer:
        pipe.send("open")
        number, under_way = first, None
        while True:
            batch = [sample_of(number + step) for step in range(choose.randint(1, 6))]
            for one in batch:
                if beside:
                    writer.begin_add(writer.encode(one.sample, one.states))
                else:
                    writer.add(one.sample, one.states)
                if choose.random() < 0.1:
                    writer.record_failure(make_sample(-number % 1000 + 10**6).sample, "timeout", "", attempts=1)
            if under_way is not None:  # committed by the second thread while this batch was added
                _tell(pipe, *under_way)
                under_way = None
            place = (number, [one.sample.key for one in batch])
            if choose.random() < 0.5:
                under_way = (writer.begin_commit(), *place)
            else:
                keys: Future[list[str]] = Future()
                keys.set_result(writer.commit())
                _tell(pipe, keys, *place)
            number += len(batch)


def _tell(pipe: Connection, commit: Future[list[str]], first: int, expected: list[str]) -> None:
    assert commit.result() == expected
    pipe.send([first, first + len(expected)])
