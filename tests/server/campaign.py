"""The faults of a capture, each as a function that does it once to a real client and a real server and then looks.

After every one: each sample is in the store exactly once, the store verifies clean, nothing of the client is left in
shared memory, and no process of it lives. CI runs each quick one once; `benchmarks/faults/run.py` runs all, many times.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsdump.cli.watching import Watch, run_session
from hsdump.engines.sglang_http import SglangEngine
from hsdump.extract.plan import ExtractOptions
from hsdump.extract.state import RunState
from hsdump.samples import TokenSample
from hsdump.spool.names import PREFIX, SHARED_MEMORY, SpoolPaths
from hsdump.store import Store
from hsdump.verify import VerifyOptions, verify_store
from tests.server.driving import write_rows
from tests.server.fault_proxy import FaultProxy
from tests.server.harness import SglangServer

OPTIONS = ExtractOptions(inputs=(), out=Path(), commit_s=0.2, disk_reserve=0, concurrency=8, server_wait_s=240)


@dataclass(kw_only=True)
class World:
    """Servers and a folder that all faults of a campaign share."""

    server: SglangServer
    proxy: FaultProxy
    folder: Path
    other_layers: SglangServer | None = None
    numbers: random.Random = field(default_factory=lambda: random.Random(1))
    runs: int = 0

    @property
    def spool(self) -> Path:
        return spool_of(self.server)

    def fresh(self, name: str) -> Path:
        """Name a store that does not exist."""
        self.runs += 1
        return self.folder / f"{self.runs:04}-{name}"


def short_samples(count: int, seed: int, longest: int = 40) -> list[TokenSample]:
    """Make samples of 8 tokens and more: longer than the handshake's, short enough for many."""
    rng = np.random.default_rng(seed)
    return [
        TokenSample.make(f"s{seed}-{i}", rng.integers(3, 2048, n), np.ones(n, dtype=np.uint8))
        for i, n in enumerate(rng.integers(8, longest, count))
    ]


def spool_of(server: SglangServer) -> Path:
    """Find the spool that this server's scheduler announces, wherever it lies."""
    named = [Path(server.serve_options[i + 1]) for i, o in enumerate(server.serve_options) if o == "--spool"]
    for root in [*named, *SHARED_MEMORY.glob(f"{PREFIX}*")]:
        for path in root.glob("server-*.json"):
            with contextlib.suppress(OSError, ValueError):
                if json.loads(path.read_text())["port"] == server.port:
                    return root
    raise AssertionError("the server announces no spool")


def run_here(url: str, rows: Path, out: Path, *, timeout_s: float = 60.0, **changes: Any) -> RunState:
    """Run one extract in this process, as the command does."""

    async def run() -> RunState:
        engines = {url: SglangEngine(url, request_timeout_s=timeout_s)}
        return await run_session(engines, replace(OPTIONS, inputs=(rows,), out=out, **changes), Watch(quiet=True))

    return asyncio.run(run())


@contextmanager
def client(url: str, rows: Path, out: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """Run one extract as a process of its own; it is gone at the end, whatever happened."""
    command = [sys.executable, "-m", "hsdump.cli.main", "extract", str(rows), "--server", url, "--out", str(out)]
    command += ["--commit-seconds", "0.2", "--disk-reserve", "0", "--server-wait", "240", "--json", *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_shard(out: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a client is at work: something is written and something is left."""
    deadline_s = time.monotonic() + 60
    while not list(out.glob("shards/*")) and process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.01)


def check(world: World, out: Path, samples: list[TokenSample], spool: Path | None = None) -> None:
    """Look at everything that a fault may not have broken."""
    with Store(out) as store:
        keys = store.keys()
        assert len(keys) == len(set(keys))
        assert sorted(keys) == sorted({sample.key for sample in samples}), f"{len(keys)} of {len(samples)} in {out}"
        assert store.failures() == {}
        assert store.requests() == []
    report = verify_store(out, VerifyOptions(), lambda _samples, _num_bytes: None)
    assert report.exit_code == 0, report
    paths = SpoolPaths(spool or world.spool)
    deadline_s = time.monotonic() + 10  # a request that the server was told to drop may end a moment later
    while left := [path.name for folder in (*paths.entries(), paths.clients) for path in folder.glob("*")]:
        assert time.monotonic() < deadline_s, left
        # What a killed client had running is swept by the next one that comes.
        asyncio.run(_visit(world.server.url))
        time.sleep(0.2)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    known = {str(server.process.pid) for server in _servers(world) if server.process is not None}
    strays = [pid for pid in set(children) - known if "extract" in _command_line(pid)]
    assert strays == []


async def _visit(url: str) -> None:
    engine = SglangEngine(url)
    await asyncio.to_thread(engine.handshake)
    await engine.close()


def _servers(world: World) -> list[SglangServer]:
    return [server for server in (world.server, world.other_layers) if server is not None]


def _command_line(pid: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def http_fault(fault: str) -> Callable[[World, int], dict[str, Any]]:
    """Strike every third request, first tries and second ones alike."""

    def run(world: World, number: int) -> dict[str, Any]:
        samples = short_samples(30, 1000 + number)
        out = world.fresh(fault)
        rows = write_rows(out.with_suffix(".jsonl"), samples)
        world.proxy.arm(lambda count: fault if count % 3 == number % 3 else None)
        # By chance a sample is struck five times running in one of eight such campaigns; it would rightly be failed.
        # Short where the limit itself is what is tried; a busy machine may take seconds for an honest answer.
        timeout_s = 5.0 if fault == "timeout" else 30.0
        state = run_here(world.proxy.url, rows, out, timeout_s=timeout_s, attempts=15)
        assert state.exit_code() == 0, state.report()
        assert world.proxy.struck[fault] > 0
        check(world, out, samples)
        return {"struck": world.proxy.struck[fault], "retries": state.retries}

    return run


def always_failing(world: World, number: int) -> dict[str, Any]:
    """One request in the run is refused for ever: it is failed with the server's words, the others are there."""
    samples = short_samples(10, 2000 + number)
    out = world.fresh("poison")
    rows = write_rows(out.with_suffix(".jsonl"), samples)
    world.proxy.arm(lambda count: "http-500" if count == 0 or count >= len(samples) else None)
    state = run_here(world.proxy.url, rows, out)
    assert state.exit_code() == 3, state.report()
    assert dict(state.failed) == {"server-error": 1}
    assert "injected http-500" in state.failures[0].detail
    world.proxy.arm(lambda _count: None)
    again = run_here(world.proxy.url, rows, out, retry_failed=True)
    assert (again.exit_code(), again.committed) == (0, 1)
    check(world, out, samples)
    return {"tries": 5}


STALLED_CLIENTS = 5


def stalled(world: World, number: int, seconds: float = 60.0) -> dict[str, Any]:
    """The server answers nothing at all for a while, the handshake's questions included. Several clients see it."""
    world.proxy.arm(lambda _count: None)
    with contextlib.ExitStack() as stack:
        runs = []
        for place in range(STALLED_CLIENTS):
            samples = short_samples(60, 3000 + 10 * number + place)
            out = world.fresh("stalled")
            rows = write_rows(out.with_suffix(".jsonl"), samples)
            # Slow enough that the stall finds it at work.
            process = stack.enter_context(client(world.proxy.url, rows, out, "--max-rate", "300"))
            runs.append((samples, out, process))
        for _, out, process in runs:
            wait_for_shard(out, process)
        time.sleep(world.numbers.random())
        world.proxy.freeze(True)
        time.sleep(seconds)
        world.proxy.freeze(False)
        for _, _, process in runs:
            text, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors + text
            assert json.loads(text)["seconds"] > seconds
    for samples, out, _ in runs:  # now that none is at work any more
        check(world, out, samples)
    return {"clients": STALLED_CLIENTS}


def client_killed(world: World, number: int) -> dict[str, Any]:
    """Kill -9 a client at any moment, and run it again."""
    samples = short_samples(150, 4000 + number)
    out = world.fresh("client-killed")
    rows = write_rows(out.with_suffix(".jsonl"), samples)
    with client(world.server.url, rows, out) as process:
        if number % 2:
            wait_for_shard(out, process)
            time.sleep(world.numbers.uniform(0, 0.3))
        else:
            time.sleep(world.numbers.uniform(0.5, 4))
        process.kill()
        process.wait()
    left = 0
    if (out / "manifest.json").exists():
        with Store(out) as store:
            left = len(store)
    state = run_here(world.server.url, rows, out)
    assert state.exit_code() == 0, state.report()
    # Killed between a shard's rename and its rows in the index, the shard is whole: the next run takes it in.
    with Store(out) as store:
        taken_in = sum(int(event.detail.split()[0]) for event in store.events() if event.kind == "shard-indexed")
    assert state.already == left + taken_in, f"{state.already} of {left} and {taken_in}"
    check(world, out, samples)
    return {"committed_before": left, "taken_in": taken_in, "aborted": state.aborted}


def interrupted(times: int) -> Callable[[World, int], dict[str, Any]]:
    """Ctrl-C once: what is in flight is finished. Twice: the run ends at once. Both leave a store that goes on."""

    def run(world: World, number: int) -> dict[str, Any]:
        samples = short_samples(150, 5000 + 100 * times + number)
        out = world.fresh(f"ctrl-c-{times}")
        rows = write_rows(out.with_suffix(".jsonl"), samples)
        with client(world.server.url, rows, out, "--max-rate", "1500") as process:
            wait_for_shard(out, process)
            time.sleep(world.numbers.uniform(0, 0.2))
            for _ in range(times):
                process.send_signal(signal.SIGINT)
                time.sleep(0.05)
            text, errors = process.communicate(timeout=60)
        assert process.returncode == 4, errors
        report = json.loads(text)
        assert report["stopped"] == "interrupted"
        with Store(out) as store:
            assert len(store) == report["committed"]
            assert store.requests() == []
        state = run_here(world.server.url, rows, out)
        assert state.exit_code() == 0, state.report()
        assert state.already == report["committed"]
        check(world, out, samples)
        return {"committed_before": report["committed"]}

    return run


def clock_jumps(world: World, number: int) -> dict[str, Any]:
    """The wall clock goes a day forward and two back while a run goes on."""
    samples = short_samples(40, 6000 + number)
    out = world.fresh("clock")
    rows = write_rows(out.with_suffix(".jsonl"), samples)
    world.proxy.arm(lambda count: "http-503" if count % 5 == 0 else None)  # with pauses, which must not notice

    class Jumping(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Jumping:
            days = world.numbers.choice((-2, -1, 0, 1))
            return super().now(tz) + datetime.timedelta(days=days)  # type: ignore[return-value]

    real = time.time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + world.numbers.choice((-172800, 0, 86400)))
        for module in ("hsdump.store.index", "hsdump.extract.events", "hsdump.extract.plan"):
            patch.setattr(f"{module}.datetime", Jumping)
        state = run_here(world.proxy.url, rows, out)
    assert state.exit_code() == 0, state.report()
    assert state.seconds < 60
    check(world, out, samples)
    return {"retries": state.retries}


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Give a folder a disk of its own of so many bytes; what is yielded makes it larger. Needs to be root."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)], check=True)
    try:
        yield lambda size: subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True) and None
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def disk_full(reserve: int) -> Callable[[World, int], dict[str, Any]]:
    """With a reserve the run stops before the disk is full; without one the disk refuses in the middle of something."""

    def run(world: World, number: int) -> dict[str, Any]:
        samples = short_samples(200, 7000 + number, longest=80)
        place = world.fresh(f"disk-{reserve}")
        rows = write_rows(place.with_suffix(".jsonl"), samples)
        size = (4 << 20) + 4096 * world.numbers.randrange(200)
        with small_disk(place, size) as grow:
            out = place / "store"
            state = run_here(world.server.url, rows, out, disk_reserve=reserve, shard_bytes=1 << 20)
            assert state.exit_code() == 4, state.report()
            assert state.error is not None
            if reserve:
                assert "are missing" in state.error.what
            before = state.committed
            grow(64 << 20)
            state = run_here(world.server.url, rows, out, shard_bytes=1 << 20)
            assert state.exit_code() == 0, state.report()
            assert state.already >= before
            check(world, out, samples)
        return {"committed_before": before}

    return run


def spool_filled(world: World, number: int) -> dict[str, Any]:
    """Another process fills the spool's folder until the file system has no room, and lets go after a while."""
    samples = short_samples(60, 8000 + number, longest=100)
    out = world.fresh("spool-filled")
    rows = write_rows(out.with_suffix(".jsonl"), samples)
    stranger = world.spool / "ready" / "somebody-elses-file"

    def fill() -> None:
        while not list(out.glob("shards/*")):  # the handshake has no second try
            time.sleep(0.02)
        with contextlib.suppress(OSError), stranger.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))

    filled = threading.Timer(0.3 * world.numbers.random(), fill)
    seconds = 1.0 + world.numbers.random()

    def free() -> None:
        filled.join()
        time.sleep(seconds)
        stranger.unlink(missing_ok=True)

    freed = threading.Thread(target=free)
    filled.start()
    freed.start()
    try:
        state = run_here(world.server.url, rows, out, max_rate=1000.0, attempts=10)
    finally:
        freed.join()
        stranger.unlink(missing_ok=True)
    assert state.exit_code() == 0, state.report()
    check(world, out, samples)
    return {"retries": state.retries}


def server_killed(world: World, number: int) -> dict[str, Any]:
    """Kill -9 the server under a client and start it again. No sample is failed for it."""
    samples = short_samples(150, 9000 + number)
    out = world.fresh("server-killed")
    rows = write_rows(out.with_suffix(".jsonl"), samples)
    dead = world.spool
    with client(world.server.url, rows, out, "--max-rate", "800") as process:
        wait_for_shard(out, process)
        time.sleep(world.numbers.uniform(0, 1))
        world.server.kill()
        world.server.start()
        text, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors + text
    report = json.loads(text)
    check(world, out, samples)
    assert not dead.exists()
    return {"server_deaths": report["server_deaths"]}


def server_replaced(other: Callable[[World], dict[str, Any]]) -> Callable[[World, int], dict[str, Any]]:
    """The server ends, and another one with other layers or another model comes back at its URL: refused, not mixed."""

    def run(world: World, number: int) -> dict[str, Any]:
        samples = short_samples(150, 10000 + number)
        out = world.fresh("server-replaced")
        rows = write_rows(out.with_suffix(".jsonl"), samples)
        before = {"model": world.server.model, "serve_options": world.server.serve_options}
        with client(world.server.url, rows, out, "--max-rate", "800") as process:
            wait_for_shard(out, process)
            time.sleep(world.numbers.uniform(0, 0.5))
            world.server.kill()
            for name, value in other(world).items():
                setattr(world.server, name, value)
            world.server.start()
            text, errors = process.communicate(timeout=120)
        assert process.returncode == 4, errors + text
        report = json.loads(text)
        assert "another server answers" in report["stopped"], report["stopped"]
        with Store(out) as store:
            assert len(store) == report["committed"]
        with pytest.MonkeyPatch.context():
            done = run_code(world.server.url, rows, out)
        assert done == 75, "the store must refuse it too"
        return {"committed_before": report["committed"], "was": str(before["serve_options"])}

    return run


def run_code(url: str, rows: Path, out: Path) -> int:
    """Give the exit code of the command."""
    with client(url, rows, out) as process:
        process.communicate(timeout=120)
        return int(process.returncode)


def other_layers(world: World) -> dict[str, Any]:
    now = world.server.serve_options
    return {"serve_options": ("--layers", "1,3,6") if "--layers" not in now else ()}


def other_model(world: World) -> dict[str, Any]:
    from tests.tiny_models import tiny_model_path

    llama, qwen3 = tiny_model_path("llama"), tiny_model_path("qwen3")
    return {"model": qwen3 if world.server.model == llama else llama}


QUICK: dict[str, Callable[[World, int], dict[str, Any]]] = {
    **{fault: http_fault(fault) for fault in ("http-500", "http-503", "timeout", "reset", "truncated", "garbage")},
    "abort": http_fault("abort"),
    "poison": always_failing,
    "client-killed": client_killed,
    "ctrl-c-once": interrupted(1),
    "ctrl-c-twice": interrupted(2),
    "clock-jumps": clock_jumps,
    "disk-full-reserve": disk_full(1 << 20),
    "disk-full-enospc": disk_full(0),
}
"""A second or two each, on one server."""

SPOOL: dict[str, Callable[[World, int], dict[str, Any]]] = {"spool-filled": spool_filled}
"""On a server whose spool is a small file system of its own."""

SLOW: dict[str, Callable[[World, int], dict[str, Any]]] = {
    "stalled": stalled,
    "server-killed": server_killed,
    "server-other-layers": server_replaced(other_layers),
    "server-other-model": server_replaced(other_model),
}
"""A minute, or a server's start, each."""
