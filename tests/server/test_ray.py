"""The same run on a local Ray cluster: two collector actors beside two real servers, one of which dies.

Ray is an extra, 80 MB that nothing else needs: without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hsdump.store import Store
from hsdump.verify import VerifyOptions, verify_store
from tests.server.campaign import short_samples
from tests.server.driving import write_rows
from tests.server.harness import SglangServer

pytest.importorskip("ray", reason="the extra `ray` is not installed: pip install 'hsdump[ray]'")
pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def servers(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SglangServer]]:
    folder = tmp_path_factory.mktemp("ray")
    one, two = (SglangServer(model=tiny_llama, log=folder / f"{name}.log") for name in "ab")
    with one, two:
        yield [one, two]


@pytest.mark.parametrize("kill", [False, True], ids=["undisturbed", "an actor is killed"])
def test_two_collectors_on_ray(servers: list[SglangServer], tmp_path: Path, kill: bool) -> None:
    samples, out = short_samples(200, 31 + kill, longest=80), tmp_path / "store"
    rows = write_rows(tmp_path / "rows.jsonl", samples)
    command = [sys.executable, "-m", "hsdump.cli.main", "extract", str(rows), "--out", str(out), "--ray", "local"]
    command += [word for server in servers for word in ("--server", server.url)]
    command += ["--commit-seconds", "0.5", "--max-rate", "500" if kill else "100000", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        if kill:
            wait_for_commits(tmp_path / "store.parts", process)
            kill_one_actor(process.pid)
        text, errors = process.communicate(timeout=300)
    finally:
        process.terminate()  # Ray's own processes end with it
    assert process.returncode == 0, errors[-3000:] + text
    report = json.loads(text)
    assert report["committed"] == len(samples)
    assert len(report["partitions"]) == 2
    assert all(len(Store(part)) > 0 for part in report["partitions"])
    with Store(out) as store:
        assert sorted(store.keys()) == sorted(sample.key for sample in samples)
    assert verify_store(out, VerifyOptions(), lambda _samples, _num_bytes: None).exit_code == 0


def wait_for_commits(parts: Path, process: subprocess.Popen[str]) -> None:
    """Wait until both collectors have committed something: a kill comes in the middle of the work then."""
    deadline_s = time.monotonic() + 300
    while time.monotonic() < deadline_s and process.poll() is None:
        if len({path.parent for path in parts.glob("*/shards/*.safetensors")}) == 2:
            return
        time.sleep(0.05)
    raise AssertionError(f"nothing was written: {process.poll()}")


def kill_one_actor(driver: int) -> None:
    """Kill -9 one of the driver's own collector processes."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            name, parent = path.read_bytes(), int(path.parent.name)
        except OSError:
            continue
        if name.startswith(b"ray::CollectorActor") and driver in ancestors(parent):
            os.kill(parent, 9)
            return
    raise AssertionError("no collector actor was found")


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return found
        found.append(pid)
    return found
