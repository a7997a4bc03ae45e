"""The driver's own rules, with engines whose behaviour the test decides."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsdump.cli.main import main
from hsdump.cli.watching import Watch, run_session
from hsdump.engines.base import CapturedSample, CaptureFailed, CaptureRequest, ServerAway, ServerLoad
from hsdump.errors import HsdumpError, ServerError, UsageError
from hsdump.extract import lanes
from hsdump.extract.collector_http import check_address
from hsdump.extract.events import Events, JsonLog
from hsdump.extract.finite import first_non_finite
from hsdump.extract.heartbeat import Heartbeat
from hsdump.extract.lanes import SICK_AFTER
from hsdump.extract.only import read_names
from hsdump.extract.plan import ExtractOptions
from hsdump.extract.session import read_endpoints, shake_hands
from hsdump.extract.state import RunState
from hsdump.schema import EngineInfo, StateShape
from hsdump.store import Store
from hsdump.store.format import RUN_NAME

SHAPE = StateShape(layers=(1, 2, 3), hidden_size=8, dtype="bfloat16", final_state="post_norm")
INFO = EngineInfo(
    engine="sglang",
    engine_version="0",
    attach="plugin",
    hsdump_version="0",
    model_path="/nowhere",
    model_class="Model",
    num_layers=8,
    vocab_size=1000,
    context_length=100,
    shape=SHAPE,
    device="cpu",
)

Behaviour = Callable[[CaptureRequest, int], None]
"""Called with a request and how often its sample was sent before; raises what shall go wrong."""


class ScriptedEngine:
    """Zeros for every sample, after the script had its say."""

    def __init__(self, script: Behaviour | None = None, info: EngineInfo | HsdumpError = INFO) -> None:
        self.script, self.info = script, info
        self.lost, self.spool_room = False, 1.0
        self.sent: Counter[str] = Counter()
        self.together = self.most_together = 0
        self.aborted: list[str] = []
        self.closed = False
        self.states: Callable[[int], tuple[Any, ...]] = lambda n: tuple(np.zeros((n, 8), np.uint16) for _ in range(4))

    def handshake(self) -> EngineInfo:
        if isinstance(self.info, HsdumpError):
            raise self.info
        return self.info

    async def capture(self, request: CaptureRequest) -> CapturedSample:
        before = self.sent[request.key]
        self.sent[request.key] += 1
        self.together += 1
        self.most_together = max(self.most_together, self.together)
        try:
            await asyncio.sleep(0.001)
            if self.script is not None:
                self.script(request, before)
        finally:
            self.together -= 1
        in_spool = isinstance(self.info, EngineInfo) and self.info.spool_max_bytes is not None
        return CapturedSample(
            token_ids=request.input_ids, states=self.states(len(request.input_ids)), in_spool=in_spool
        )

    async def reconnect(self) -> EngineInfo:
        info = self.handshake()
        self.lost = False
        return info

    async def load(self) -> ServerLoad | None:
        return None

    def request_id(self, request: CaptureRequest) -> str:
        return f"id-{request.key}"

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids

    async def close(self) -> None:
        self.closed = True


def rows_file(folder: Path, count: int) -> Path:
    path = folder / "rows.jsonl"
    lines = ({"id": f"row-{i}", "input_ids": [5, 6, i + 7], "loss_mask": [0, 1, 1]} for i in range(count))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(folder: Path, engines: dict[str, ScriptedEngine], count: int = 10, **changes: Any) -> RunState:
    rows = rows_file(folder, count)
    options = ExtractOptions(inputs=(rows,), out=folder / "store", disk_reserve=0, commit_s=0.1, server_wait_s=5)
    return asyncio.run(run_session(dict(engines), replace(options, **changes), Watch(quiet=True)))


def test_a_servers_death_costs_no_try_however_often(tmp_path: Path) -> None:
    engine = ScriptedEngine()

    def die(request: CaptureRequest, before: int) -> None:
        if before < 4:
            engine.lost = True
            raise ServerAway("gone")

    engine.script = die
    state = run(tmp_path, {"a": engine}, count=2, attempts=1)
    assert state.exit_code() == 0
    assert state.server_deaths == 8
    assert not state.failed


def test_a_sample_that_kills_servers_is_found_and_only_that_one(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    poison: list[str] = []

    def die(request: CaptureRequest, before: int) -> None:
        if request.input_ids[2] == 7 + 3:
            poison[:] = [request.key]
            engine.lost = True
        if engine.lost:
            raise ServerAway("gone")

    engine.script = die
    state = run(tmp_path, {"a": engine}, count=6)
    assert state.exit_code() == 3
    assert dict(state.failed) == {"server-died": 1}
    assert [failure.key for failure in state.failures] == poison
    assert "with nothing else to do" in state.failures[0].detail
    assert len(Store(tmp_path / "store")) == 5


def test_another_server_takes_over_and_nothing_is_lost(tmp_path: Path) -> None:
    dead, alive = ScriptedEngine(), ScriptedEngine()

    def die(request: CaptureRequest, before: int) -> None:
        dead.lost, dead.info = True, ServerError("nothing answers", "start it")
        raise ServerAway("gone")

    dead.script = die
    state = run(tmp_path, {"dead": dead, "alive": alive}, count=40)
    assert state.exit_code() == 0
    assert [lane.status for lane in state.lanes] == ["away", "up"]
    assert state.lanes[1].captured == 40


def test_no_server_left_ends_the_run_and_says_how_long_it_waited(tmp_path: Path) -> None:
    engine = ScriptedEngine()

    def die(request: CaptureRequest, before: int) -> None:
        engine.lost, engine.info = True, ServerError("nothing answers", "start it")
        raise ServerAway("gone")

    engine.script = die
    state = run(tmp_path, {"a": engine}, server_wait_s=0.2)
    assert state.exit_code() == 4
    assert state.stopped == "a: nothing answers; away for more than 0 s"


def test_another_model_at_the_same_url_is_refused(tmp_path: Path) -> None:
    engine = ScriptedEngine()

    def swap(request: CaptureRequest, before: int) -> None:
        engine.info, engine.lost = replace(INFO, num_layers=9), True
        raise ServerAway("gone")

    engine.script = swap
    state = run(tmp_path, {"a": engine})
    assert state.exit_code() == 4
    assert state.stopped == "another server answers at a now: num_layers was 8, is 9"
    assert len(Store(tmp_path / "store")) == 0


def test_other_weights_in_the_same_folder_are_another_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"before")

    def overwritten(request: CaptureRequest, before: int) -> None:
        if request.input_ids[2] == 12 and not before:
            (model / "model.safetensors").write_bytes(b"after!")
            engine.lost = True
            raise ServerAway("started anew")

    engine = ScriptedEngine(overwritten, replace(INFO, model_path=str(model)))
    state = run(tmp_path, {"one": engine}, concurrency=1)
    assert state.exit_code() == 4
    assert re.match(r"another server answers at one now: model was .* \(digest", state.stopped or "")
    assert 0 < len(Store(tmp_path / "store")) < 10


def test_files_that_come_and_go_are_no_reason_to_give_a_server_up(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    tries = Counter[str]()

    def dies(request: CaptureRequest, before: int) -> None:
        if request.input_ids[2] == 12 and not before:
            engine.lost = True
            raise ServerAway("it died")

    async def reconnect() -> EngineInfo:
        tries["all"] += 1
        if tries["all"] == 1:
            raise FileNotFoundError("a spool's folder")
        engine.lost = False
        return INFO

    engine.script, engine.reconnect = dies, reconnect  # type: ignore[method-assign]
    state = run(tmp_path, {"one": engine})
    assert (state.exit_code(), state.committed, tries["all"]) == (0, 10, 2)


def test_servers_that_differ_are_not_mixed() -> None:
    other = ScriptedEngine(info=replace(INFO, shape=replace(SHAPE, layers=(1, 2, 4))))
    with pytest.raises(ServerError, match="b is not what a is: shape was"):
        asyncio.run(shake_hands({"a": ScriptedEngine(), "b": other}, limits()))


def limits() -> Any:
    from hsdump.extract.lanes import FleetLimits

    return FleetLimits()


def test_a_server_that_does_not_answer_at_the_start_is_taken_in_later(tmp_path: Path) -> None:
    late = ScriptedEngine(info=ServerError("nothing answers", "start it"))
    first = ScriptedEngine(lambda _request, _before: setattr(late, "info", INFO))
    state = run(tmp_path, {"first": first, "late": late}, count=60, max_rate=90.0)
    assert state.exit_code() == 0
    assert state.lanes[1].captured > 0


def test_an_ill_server_costs_samples_a_bounded_number_of_tries(tmp_path: Path) -> None:
    """It answers nothing but errors for a while: a handshake decides, not thousands of samples that fail."""
    engine = ScriptedEngine()
    total = 0

    def fail(request: CaptureRequest, before: int) -> None:
        nonlocal total
        total += 1
        if total <= SICK_AFTER:
            raise CaptureFailed("server-error", "HTTP 503: overloaded", transient=True)

    engine.script = fail
    state = run(tmp_path, {"a": engine}, count=30)
    assert state.exit_code() == 0
    assert state.retries == SICK_AFTER


def test_failures_are_listed_and_too_many_end_the_run(tmp_path: Path) -> None:
    def refuse(request: CaptureRequest, before: int) -> None:
        raise CaptureFailed("rejected-by-server", "HTTP 400: too long", transient=False)

    state = run(tmp_path, {"a": ScriptedEngine(refuse)}, count=30, max_failed=5)
    assert state.exit_code() == 4
    assert "6 samples failed, more than --max-failed 5" in str(state.stopped)
    assert state.failures[0].detail == "HTTP 400: too long"
    assert state.report()["failures"]


def test_states_that_are_no_numbers_are_failed_with_their_place(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    poisoned = tuple(np.zeros((3, 8), np.uint16) for _ in range(4))
    poisoned[1][2, 5] = 0x7FC0  # NaN
    engine.states = lambda _n: poisoned
    state = run(tmp_path, {"a": engine}, count=1)
    assert state.exit_code() == 3
    assert state.failures[0].reason == "not-finite"
    assert state.failures[0].detail == "layer2 of token 2 is NaN or infinite"


@pytest.mark.parametrize(
    ("dtype", "kind", "values"),
    [
        ("bfloat16", np.uint16, {0x7F80: False, 0xFF80: False, 0x7FC1: False, 0x7F7F: True, 0x8000: True}),
        ("float16", np.float16, {np.inf: False, -np.inf: False, np.nan: False, 65504.0: True, -0.0: True}),
        ("float32", np.float32, {np.inf: False, np.nan: False, 3.4e38: True}),
    ],
)
def test_every_kind_of_number(dtype: str, kind: Any, values: dict[float, bool]) -> None:
    for value, fine in values.items():
        state = np.ones((40_000, 8), kind)
        state[39_999, 7] = value
        assert first_non_finite(["final"], [state], dtype) == (None if fine else "final of token 39999")


def test_tokens_in_flight_are_bounded_and_a_longer_sample_goes_alone(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    assert run(tmp_path, {"a": engine}, count=20, tokens_in_flight=7).exit_code() == 0
    assert engine.most_together == 2  # 3 tokens each
    (tmp_path / "more").mkdir()
    alone = ScriptedEngine()
    assert run(tmp_path / "more", {"a": alone}, count=5, tokens_in_flight=1).exit_code() == 0
    assert alone.most_together == 1


def test_a_reserve_that_is_not_there_stops_the_run_and_says_what_is_missing(tmp_path: Path) -> None:
    state = run(tmp_path, {"a": ScriptedEngine()}, disk_reserve=1 << 60)
    assert state.exit_code() == 4
    assert "bytes free" in str(state.stopped)
    assert "are missing" in str(state.stopped)
    assert state.error is not None
    assert "--disk-reserve" in state.error.fix


def test_requests_of_a_dead_run_are_taken_off_the_servers(tmp_path: Path) -> None:
    """The index says what was on its way."""
    from hsdump.store import StoreWriter
    from hsdump.store.index import RequestRow

    assert run(tmp_path, {"a": ScriptedEngine()}, count=1).exit_code() == 0
    manifest = Store(tmp_path / "store").manifest
    with StoreWriter.open(tmp_path / "store", manifest) as writer, writer.index.transaction():
        row = RequestRow(key="k", source="s", num_tokens=3, state="sent", request_id="hsdump-x", server="a", at="")
        writer.index.set_requests([row], [])
    engine = ScriptedEngine()
    state = run(tmp_path, {"a": engine}, count=2)
    assert engine.aborted == ["hsdump-x"]
    assert state.aborted == 1
    assert Store(tmp_path / "store").requests() == []


def test_a_server_that_was_left_to_be_looked_at_is_looked_at_as_soon_as_it_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    class Suspicious(ScriptedEngine):
        """Counts ours as running, as SGLang before 0.5.23 does, so that the run has to leave it alone for a look."""

        async def load(self) -> ServerLoad | None:
            looks.append(self.together)
            monkeypatch.setattr(lanes, "LOOK_EVERY_S", 3600.0)  # no other look comes by itself
            return ServerLoad(running=self.together, waiting=0)

        async def capture(self, request: CaptureRequest) -> CapturedSample:
            self.together += 1
            while not looks:
                await asyncio.sleep(0.01)
            self.together -= 1
            return await super().capture(request)

    monkeypatch.setattr(lanes, "LOOK_EVERY_S", 0.05)
    state = run(tmp_path, {"a": Suspicious()}, count=40, concurrency=4)
    assert (state.exit_code(), state.committed) == (0, 40)
    assert looks == [4, 0]


@pytest.mark.parametrize("ends", ["before the look", "during the look"])
def test_a_request_of_ours_that_ends_with_a_look_is_nobody_elses(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(lanes, "SETTLED_S", 0.2)
    cost = lanes.Cost(10, 1000)

    class Late(ScriptedEngine):
        """Says what was there a moment ago."""

        looks = 0

        async def load(self) -> ServerLoad | None:
            self.looks += 1
            if self.looks == 2:
                lane.answered(cost, well=True)
            return ServerLoad(running=int(self.looks <= 2 or lane.settles_in_s > 0), waiting=0)

    async def run_a_while() -> None:
        fleet.start()
        lane.begin(cost)
        if ends == "before the look":
            lane.answered(cost, well=True)
            lane.state.in_flight = 0
            engine.looks = 2
        while engine.looks < 6:
            await asyncio.sleep(0.01)
            assert lane.courtesy.others == 0
            assert not lane.courtesy.is_live
        await fleet.close()

    engine = Late()
    lane = lanes.Lane("a", engine, INFO, lanes.FleetLimits())
    fleet = lanes.Fleet([lane], INFO, "unknown", lanes.FleetLimits(), Events())
    asyncio.run(asyncio.wait_for(run_a_while(), 30))


def test_a_server_that_stops_saying_how_busy_it_is_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mute(ScriptedEngine):
        looks = 0

        async def load(self) -> ServerLoad | None:
            self.looks += 1
            return ServerLoad(running=5, waiting=0) if self.looks == 1 else None

        async def capture(self, request: CaptureRequest) -> CapturedSample:
            while not self.looks:
                await asyncio.sleep(0.01)
            return await super().capture(request)

    monkeypatch.setattr(lanes, "LOOK_EVERY_S", 0.02)
    state = run(tmp_path, {"a": Mute()}, count=20, concurrency=2)
    assert (state.exit_code(), state.committed) == (0, 20)


def test_names_and_servers_are_read(tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    ids.write_text("c\n\nd\n")
    assert read_names(["a,b", f"@{ids}", "a"]) == ("a", "b", "c", "d")
    with pytest.raises(UsageError, match="names nothing"):
        read_names([","])
    servers = tmp_path / "servers"
    servers.write_text("# ours\nhttp://10.0.0.1:30000/  /dev/shm/hsdump-x\nhttp://10.0.0.2:30000 # second\n")
    found = read_endpoints(["http://h:1"], servers, None)
    assert [endpoint.url for endpoint in found] == ["http://h:1", "http://10.0.0.1:30000", "http://10.0.0.2:30000"]
    assert found[1].spool == Path("/dev/shm/hsdump-x")
    with pytest.raises(UsageError, match="named twice"):
        read_endpoints(["http://h:1", "http://h:1/"], None, None)
    with pytest.raises(UsageError, match="one spool for several servers"):
        read_endpoints(["http://h:1", "http://h:2"], None, Path("/x"))
    with pytest.raises(UsageError, match=r"--servers .* cannot be read"):
        read_endpoints([], tmp_path / "nothing", None)


@pytest.mark.parametrize("host", ["0.0.0.0", "8.8.8.8", "example.com", "::"])
def test_collectors_listen_where_strangers_are_not(host: str) -> None:
    with pytest.raises(UsageError, match=f"--listen {host}"):
        check_address(host)
    for fine in ("127.0.0.1", "10.1.2.3", "192.168.0.9", "::1"):
        check_address(fine)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["extract", "x.jsonl"], "--out is missing"),
        (["extract", "x.jsonl", "--out", "o"], "--server is missing"),
        (["extract", "x.jsonl", "--collector", "http://h:1", "--out", "o"], "--collector does not go with"),
        (["collect", "--server", "http://h:1", "--out", "o", "--listen", "nowhere"], "is not ADDRESS:PORT"),
        (["collect", "--server", "http://h:1", "--out", "o"], "the token is shorter than 16"),
    ],
)
def test_what_the_command_line_refuses(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HSDUMP_COLLECT_TOKEN", raising=False)
    assert main(arguments) == 64
    assert message in capsys.readouterr().err


def test_a_plan_asks_a_server_and_measures_its_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = []

    def make(url: str, **_: Any) -> ScriptedEngine:
        engines.append(ScriptedEngine())
        return engines[-1]

    monkeypatch.setattr("hsdump.cli.plan.SglangEngine", make)
    monkeypatch.setattr("hsdump.cli.plan.Renderer.load", lambda *_: None)
    rows = rows_file(tmp_path, 50)
    assert main(["plan", str(rows), "--server", "http://h:1", "--out", str(tmp_path / "s"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["samples"], found["bytes_per_token"]) == (50, SHAPE.bytes_per_token)
    assert found["tokens_per_s"] > 0
    assert found["seconds"] == pytest.approx(150 / found["tokens_per_s"])
    assert sum(engine.sent.total() for engine in engines) == 32


def test_what_a_run_says_of_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, {"a": ScriptedEngine()}, count=7).exit_code() == 0
    assert main(["status", str(tmp_path / "store"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["states"]["committed"] == 7
    assert found["run"]["servers"][0]["name"] == "a"
    assert not found["running"]
    assert main(["status", str(tmp_path / "store")]) == 0
    assert "none is going on" in capsys.readouterr().out
    assert main(["status", str(tmp_path / "nowhere")]) == 74


def test_numbers_for_prometheus_end_with_the_run() -> None:
    import socket
    import urllib.request

    from hsdump.extract.prometheus import serve_metrics

    state = RunState()
    state.failed["server-error"] = 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    end = serve_metrics(state, port)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert b'hsdump_samples_failed_total{reason="server-error"} 2.0' in answer.read()
        with pytest.raises(UsageError, match=f"--metrics-port {port} cannot be used"):
            serve_metrics(state, port)
    finally:
        end()


def test_a_log_that_cannot_be_written_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--json-log"):
        JsonLog(tmp_path)


def test_a_full_disk_ends_the_json_log_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    log = JsonLog(Path("/dev/full"))
    for _ in range(3):
        log("progress", {})
    log.close()
    assert capfd.readouterr().err.count("--json-log /dev/full ends here: No space left on device") == 1


def test_a_name_that_is_no_utf8_does_not_end_the_json_log(tmp_path: Path) -> None:
    log = JsonLog(tmp_path / "log")
    log("started", {"store": os.fsdecode(b"/data/\xff")})
    log.close()
    assert json.loads((tmp_path / "log").read_text())["event"] == "started"


def test_a_slow_disk_holds_neither_the_run_nor_its_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, disk_answers = RunState(), threading.Event()
    state.is_open = True
    heartbeat = Heartbeat(tmp_path, state)
    replace_file = Path.replace

    def slow(self: Path, target: Path) -> Path:
        assert disk_answers.wait(30)
        return replace_file(self, target)

    async def beat() -> None:
        beating = asyncio.create_task(heartbeat.beat())
        await asyncio.sleep(0.1)  # the loop goes on
        beating.cancel()
        state.captured = 7
        threading.Timer(0.1, disk_answers.set).start()
        heartbeat.last_beat()
        state.captured = 8
        await heartbeat.beat()

    monkeypatch.setattr(Path, "replace", slow)
    asyncio.run(beat())
    assert json.loads((tmp_path / RUN_NAME).read_text())["captured"] == 7
