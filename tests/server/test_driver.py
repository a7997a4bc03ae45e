"""The driver on two real servers: work shared, a server lost and taken back, collectors, and every quick fault once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from hsdump.extract.heartbeat import store_status
from hsdump.store import Store
from hsdump.store.surgery import SurgeryOptions, merge
from hsdump.verify import VerifyOptions, verify_store
from tests.server.campaign import QUICK, World, check, client, short_samples, wait_for_shard
from tests.server.driving import write_rows
from tests.server.fault_proxy import FaultProxy
from tests.server.harness import SglangServer

pytestmark = pytest.mark.server

IN_CI = ("http-503", "reset", "truncated", "abort", "poison", "clock-jumps", "ctrl-c-twice", "disk-full-reserve")
"""The others take longer, or are in test_kills; all of them, 20 times each: benchmarks/results/faults.md."""

NEEDS_ROOT = {"disk-full-reserve", "disk-full-enospc"}

TOKEN = "a-token-for-tests-0123456789"


@pytest.fixture(scope="module")
def world(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("driver")
    first = SglangServer(model=tiny_llama, log=folder / "first.log")
    second = SglangServer(model=tiny_llama, log=folder / "second.log")
    with first, second, FaultProxy(first.port) as proxy:
        yield World(server=first, other_layers=second, proxy=proxy, folder=folder)


@pytest.mark.parametrize("fault", IN_CI)
def test_a_fault_once(world: World, fault: str) -> None:
    if fault in NEEDS_ROOT and os.geteuid() != 0:
        pytest.skip("a disk of its own needs root")
    QUICK[fault](world, 1)


def extract(*args: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hsdump.cli.main", "extract", *map(str, args)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env={**os.environ, **(env or {})}
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_two_servers_share_the_work_and_one_may_die_and_come_back(world: World, tmp_path: Path) -> None:
    second = world.other_layers
    assert second is not None
    samples, out, log = short_samples(300, 1, longest=100), tmp_path / "store", tmp_path / "log.jsonl"
    rows = write_rows(tmp_path / "rows.jsonl", samples)
    more = ("--server", second.url, "--json-log", str(log), "--max-rate", "900", "--metrics-port", "29471")
    world.proxy.arm(lambda _count: None)
    with client(world.proxy.url, rows, out, *more) as process:
        wait_for_shard(out, process)
        metrics = httpx.get("http://127.0.0.1:29471/metrics").text
        assert f'hsdump_server_up{{server="{second.url}"}} 1.0' in metrics
        while not (out / "run.json").exists() and process.poll() is None:
            time.sleep(0.05)  # written every second
        status = store_status(out)
        assert status.running
        assert status.run is not None
        assert {lane["name"] for lane in status.run["servers"]} == {world.proxy.url, second.url}
        second.kill()
        world.proxy.freeze(True)  # or the first one does it all before the second is back
        second.start()
        deadline_s = time.monotonic() + 60
        while "server-back" not in log.read_text() and time.monotonic() < deadline_s:
            time.sleep(0.1)
        world.proxy.freeze(False)
        text, errors = process.communicate(timeout=200)
    report = json.loads(text)
    assert process.returncode == 0, errors + text
    tokens = {lane["name"]: lane["tokens"] for lane in report["servers"]}
    assert min(tokens.values()) > 0
    assert report["servers"][1]["deaths"] == 1
    events = [json.loads(line) for line in log.read_text().splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "started"
    assert kinds[-1] == "ended"
    assert kinds.index("server-away") < kinds.index("server-back")
    check(world, out, samples)
    after = store_status(out)
    assert not after.running
    assert after.states == {"pending": 0, "sent": 0, "captured": 0, "committed": 300, "failed": 0}


def test_a_subset_by_id_or_key(world: World, tmp_path: Path) -> None:
    samples, out = short_samples(10, 2), tmp_path / "store"
    rows = write_rows(tmp_path / "rows.jsonl", samples)
    ids = tmp_path / "ids.txt"
    ids.write_text(f"{samples[3].source}\n{samples[4].key}\n")
    common = (rows, "--server", world.server.url, "--out", out, "--json")
    done = extract(*common, "--only", f"@{ids}", "--only", "nobody")
    report = json.loads(done.stdout)
    assert done.returncode == 3
    assert (report["committed"], report["not_asked"], report["unknown_ids"]) == (2, 8, ["nobody"])
    with Store(out) as store:
        assert set(store.keys()) == {samples[3].key, samples[4].key}
    assert extract(*common, "--only", "@nowhere.txt").returncode == 64


@contextmanager
def collecting(server: SglangServer, out: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `hsdump collect` beside a server; gives its URL."""
    command = [sys.executable, "-m", "hsdump.cli.main", "collect", "--server", server.url, "--out", str(out)]
    command += ["--listen", "127.0.0.1:0"]
    env = {**os.environ, "HSDUMP_COLLECT_TOKEN": TOKEN}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "listening at" in line, line
        yield f"http://{line.split()[-1]}", process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_collectors_write_partitions_that_merge(world: World, tmp_path: Path) -> None:
    second = world.other_layers
    assert second is not None
    samples = short_samples(120, 3, longest=80)
    rows = write_rows(tmp_path / "rows.jsonl", samples)
    parts = [tmp_path / "part-1", tmp_path / "part-2"]
    with collecting(world.server, parts[0]) as (one, _), collecting(second, parts[1]) as (two, _):
        command = (rows, "--collector", one, "--collector", two, "--commit-seconds", "0.5", "--json")
        assert extract(*command, env={"HSDUMP_COLLECT_TOKEN": "wrong"}).returncode == 69
        done = extract(*command, env={"HSDUMP_COLLECT_TOKEN": TOKEN})
        assert done.returncode == 0, done.stderr + done.stdout
        report = json.loads(done.stdout)
        assert report["committed"] == len(samples)
        assert report["partitions"] == [str(part) for part in parts]
        again = json.loads(extract(*command, env={"HSDUMP_COLLECT_TOKEN": TOKEN}).stdout)
        assert (again["already_committed"], again["committed"]) == (len(samples), 0)
    for part in parts:
        assert len(Store(part)) > 0.2 * len(samples)
    merge(parts, tmp_path / "store", SurgeryOptions())
    check(world, tmp_path / "store", samples)


def test_a_collector_that_dies_costs_nothing(world: World, tmp_path: Path) -> None:
    samples = short_samples(120, 4, longest=80)
    rows = write_rows(tmp_path / "rows.jsonl", samples)
    parts = [tmp_path / "part-1", tmp_path / "part-2"]
    second = world.other_layers
    assert second is not None
    with collecting(world.server, parts[0]) as (one, _), collecting(second, parts[1]) as (two, dying):

        def kill() -> None:
            deadline_s = time.monotonic() + 60
            while not list(parts[1].glob("shards/*")) and time.monotonic() < deadline_s:
                time.sleep(0.02)
            dying.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        command = (rows, "--collector", one, "--collector", two, "--commit-seconds", "0.3", "--max-rate", "1500")
        done = extract(*command, "--json", env={"HSDUMP_COLLECT_TOKEN": TOKEN})
        killer.join()
        assert done.returncode == 0, done.stderr + done.stdout
    merge(parts, tmp_path / "store", SurgeryOptions())
    with Store(tmp_path / "store") as store:
        assert sorted(store.keys()) == sorted(sample.key for sample in samples)
    assert verify_store(tmp_path / "store", VerifyOptions(), lambda _samples, _num_bytes: None).exit_code == 0
