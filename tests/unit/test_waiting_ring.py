"""A store that is slower than a server whose memory comes back pass by pass: the ring takes what is sent, always."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsdump.cli.watching import Watch, run_session
from hsdump.engines.base import CapturedSample, CaptureFailed, CaptureRequest, ServerAway
from hsdump.engines.ring_collector import RingCollector
from hsdump.errors import ServerError
from hsdump.extract.driver import Driver
from hsdump.extract.keeper import Keeper
from hsdump.extract.plan import ExtractOptions
from hsdump.samples import TokenSample
from hsdump.schema import EngineInfo
from hsdump.spool.names import Rid, new_run
from hsdump.spool.ring import RegionLayout, RingReader, RingSegment, RingWriter
from hsdump.store import Store
from tests.unit.test_driver import INFO, SHAPE, ScriptedEngine, run
from tests.unit.test_waiting import LARGE, slow_store, with_spool

WIDE = replace(SHAPE, hidden_size=256)
SHORTEST, LONGEST = 12, 180
IN_A_PASS = 480
"""Tokens."""

PASS_BYTES = RegionLayout(WIDE, IN_A_PASS, IN_A_PASS // SHORTEST).total_bytes
DISK_TOKENS_PER_S = 12_000


class PassByPass(ScriptedEngine):
    """A server that runs whole requests together, in passes, and a real ring between it and the client."""

    def __init__(self, folder: Path, passes: int) -> None:
        super().__init__(info=replace(INFO, shape=WIDE, context_length=LONGEST, spool_max_bytes=passes * PASS_BYTES))
        self.ring = RingWriter(folder / "ring", WIDE, passes * PASS_BYTES)
        self.collector = RingCollector([folder / "ring"], WIDE)
        self.queue: deque[tuple[Rid, Any, asyncio.Future[None]]] = deque()
        self.serving: asyncio.Task[None] | None = None
        self.refused = self.most_used = 0
        self.name = new_run()

    @property
    def spool_room(self) -> float:
        return self.collector.room

    @spool_room.setter
    def spool_room(self, _value: float) -> None:
        pass  # the base class sets what it has none of

    async def serve(self) -> None:
        while True:
            await asyncio.sleep(0.002)
            taken: list[tuple[Rid, Any, asyncio.Future[None]]] = []
            room = IN_A_PASS
            while self.queue and self.queue[0][0].num_tokens <= room:
                taken.append(self.queue.popleft())
                room -= taken[-1][0].num_tokens
            if taken:
                self.run_pass(taken)

    def run_pass(self, taken: list[tuple[Rid, Any, asyncio.Future[None]]]) -> None:
        first = np.cumsum([0, *(rid.num_tokens for rid, _, _ in taken)]).tolist()
        rids = [rid for rid, _, _ in taken]
        segments = [RingSegment(str(rid), row, 0, rid.num_tokens) for row, rid in zip(first, rids, strict=False)]
        found = self.ring.reserve(segments)
        self.most_used = max(self.most_used, self.ring.used_bytes)
        if found is None:
            self.refused += len(taken)
            for _, _, future in taken:
                future.set_exception(CaptureFailed("spool-full", "the ring", transient=True))
            return
        offset, layout, end = found
        at, ids = offset + layout.token_ids_offset, np.concatenate([ids for _, ids, _ in taken])
        self.ring.map[at : at + 8 * len(ids)] = ids.astype("<i8").tobytes()
        self.ring.publish(end)
        for _, _, future in taken:
            future.set_result(None)

    async def capture(self, request: CaptureRequest) -> CapturedSample:
        if self.serving is None:
            self.serving = asyncio.create_task(self.serve())
        rid = Rid(self.name, request.key, request.attempt, len(request.input_ids))
        rows, answered = self.collector.expect(rid), asyncio.get_running_loop().create_future()
        self.queue.append((rid, request.input_ids, answered))
        await answered
        found = await asyncio.wrap_future(rows)
        return CapturedSample(
            token_ids=np.array(found.token_ids), states=found.states, release=found.release, in_spool=found.in_spool
        )

    async def close(self) -> None:
        assert self.serving is not None
        self.serving.cancel()
        await asyncio.to_thread(self.collector.close)


@pytest.mark.parametrize(("passes", "concurrency"), [(4, 8), (4, 40), (9, 16), (9, 80)])
def test_a_ring_never_refuses_a_pass_for_what_waits_there(
    passes: int, concurrency: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, disk = Keeper.keep, asyncio.Lock()

    async def slow(self: Keeper, sample: TokenSample, *what: Any) -> None:
        async with disk:
            await asyncio.sleep(len(sample.input_ids) / DISK_TOKENS_PER_S)
        await keep(self, sample, *what)

    monkeypatch.setattr(Keeper, "keep", slow)
    engine, rng = PassByPass(tmp_path, passes), np.random.default_rng(passes)
    rows = [rng.integers(1, 1000, rng.integers(SHORTEST, LONGEST + 1)).tolist() for _ in range(300)]
    lines = (json.dumps({"id": f"r{i}", "input_ids": ids, "loss_mask": [1] * len(ids)}) for i, ids in enumerate(rows))
    (tmp_path / "wide.jsonl").write_text("\n".join(lines))
    options = ExtractOptions(
        inputs=(tmp_path / "wide.jsonl",), out=tmp_path / "store", disk_reserve=0, concurrency=concurrency
    )
    state = asyncio.run(run_session({"a": engine}, options, Watch(quiet=True)))
    assert (state.exit_code(), state.committed, state.retries, engine.refused) == (0, 300, 0, 0)
    assert engine.most_used > 0.4 * passes * PASS_BYTES  # it went ahead of the store
    with Store(tmp_path / "store") as store:
        assert len(store) == 300


def test_a_rings_room_counts_what_is_freed_out_of_turn_and_its_end(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "ring", WIDE, 8 * PASS_BYTES)
    reader = RingReader(tmp_path / "ring", WIDE)
    assert reader.room == 1.0
    regions = []
    for number in range(3):
        place = writer.reserve([RingSegment(f"r{number}", 0, 0, IN_A_PASS)])
        assert place is not None
        writer.publish(place[2])
        regions.append(reader.poll())
    one = regions[0]
    assert one is not None
    held = one.layout.total_bytes / writer.data_bytes
    assert reader.room == pytest.approx(1 - 4 * held)
    for region in reversed(regions[1:]):
        assert region is not None
        reader.free(region)
    assert reader.room == pytest.approx(1 - 4 * held)
    reader.free(one)
    assert reader.room == pytest.approx(1 - held)


def test_a_full_spool_costs_no_try_while_samples_of_this_run_wait_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: ScriptedEngine

    def refuse(request: CaptureRequest, before: int) -> None:
        if request.input_ids[2] % 10 == 0 and before < 2:
            raise CaptureFailed("spool-full", "0 bytes left", transient=True)

    engine = ScriptedEngine(refuse, with_spool(LARGE))
    slow_store(monkeypatch, 1.0)
    state = run(tmp_path, {"a": engine}, count=60, attempts=2)
    assert (state.exit_code(), state.committed, state.retries) == (0, 60, 12)

    def always(_request: CaptureRequest, _before: int) -> None:
        raise CaptureFailed("spool-full", "0 bytes left", transient=True)

    (tmp_path / "alone").mkdir()
    state = run(tmp_path / "alone", {"a": ScriptedEngine(always, with_spool(LARGE))}, count=1, attempts=2)
    assert (state.exit_code(), dict(state.failed)) == (3, {"spool-full": 1})


def test_a_request_that_hangs_does_not_lengthen_the_wait_for_a_server_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging(ScriptedEngine):
        async def capture(self, request: CaptureRequest) -> CapturedSample:
            if request.input_ids[2] == 7:
                await asyncio.sleep(6)
            await asyncio.sleep(0.1)
            self.lost = True
            raise ServerAway("gone")

        async def reconnect(self) -> EngineInfo:
            raise ServerError("nobody answers", "start it")

    stop, stopped_s, begin_s = Driver.stop, [], time.monotonic()

    def noted(self: Driver, reason: str) -> None:
        stopped_s.append(time.monotonic() - begin_s)
        stop(self, reason)

    monkeypatch.setattr(Driver, "stop", noted)
    state = run(tmp_path, {"a": Hanging(info=with_spool(LARGE))}, count=5, server_wait_s=0.5)
    assert state.exit_code() == 4
    assert stopped_s[0] < 4
