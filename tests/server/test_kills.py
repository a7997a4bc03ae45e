"""kill -9, of the client and of the server, again and again: each sample ends up in the store exactly once."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hsdump.samples import TokenSample
from hsdump.spool.names import PREFIX, SHARED_MEMORY, SpoolPaths
from tests.server.driving import TOLERANCE, reference, relative_error, stored, token_samples, write_rows
from tests.server.harness import SglangServer

pytestmark = pytest.mark.server

KILLS = int(os.environ.get("HSDUMP_KILLS", "3"))
"""A server's start takes half a minute. HSDUMP_KILLS=10 for more; benchmarks/results/faults.md has twenty of each."""


def extract_command(rows: Path, url: str, out: Path) -> list[str]:
    command = [sys.executable, "-m", "hsdump.cli.main", "extract", str(rows), "--server", url, "--out", str(out)]
    return [*command, "--commit-seconds", "0.2", "--server-wait", "240", "--json"]


def spool_of(server: SglangServer) -> Path:
    """Find the spool that this server's scheduler announces."""
    found = [
        path.parent
        for path in SHARED_MEMORY.glob(f"{PREFIX}*/server-*.json")
        if json.loads(path.read_text())["port"] == server.port
    ]
    assert len(found) == 1
    return found[0]


def leftovers(spool: Path) -> list[str]:
    paths = SpoolPaths(spool)
    return [path.name for folder in (*paths.entries(), paths.clients) for path in folder.iterdir()]


def wait_for_shard(out: Path, before: int, client: subprocess.Popen[bytes]) -> None:
    """Wait until a client has written something new, or has ended."""
    deadline = time.monotonic() + 60
    while len(list(out.glob("shards/*"))) <= before and client.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def check_union(out: Path, samples: list[TokenSample], model: Path) -> None:
    """Each sample once, verified by the product, and a few of them against transformers."""
    shape, states, ids = stored(out)
    assert sorted(states) == sorted(sample.key for sample in samples)
    done = subprocess.run(
        [sys.executable, "-m", "hsdump.cli.main", "verify", str(out)], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout
    for key in sorted(states)[::20]:
        expected = reference(model, ids[key], shape.layers)
        assert max(relative_error(a, b) for a, b in zip(states[key], expected, strict=True)) <= TOLERANCE


def test_the_client_is_killed_again_and_again(tiny_llama: Path, tmp_path: Path) -> None:
    samples = token_samples(400, 2048, seed=21)
    rows, out = write_rows(tmp_path / "rows.jsonl", samples), tmp_path / "store"
    moments = random.Random(5)
    with SglangServer(model=tiny_llama, log=tmp_path / "server.log") as server:
        committed = 0
        for number in range(KILLS):
            before = len(list(out.glob("shards/*")))
            client = subprocess.Popen(extract_command(rows, server.url, out), stdout=subprocess.DEVNULL)
            if number % 2:  # at work: a new shard is there, other samples are on their way
                wait_for_shard(out, before, client)
                time.sleep(moments.uniform(0.0, 0.5))
            else:  # anywhere: imports, handshake, opening the store, at work
                time.sleep(moments.uniform(0.5, 5.0))
            client.kill()
            client.wait()
            if (out / "manifest.json").exists():
                now = len(stored(out)[1])
                assert now >= committed, "a committed sample is gone"
                committed = now
        last = subprocess.run(extract_command(rows, server.url, out), capture_output=True, text=True, check=False)
        assert last.returncode == 0, last.stderr
        report = json.loads(last.stdout)
        assert report["already_committed"] >= committed > 0
        check_union(out, samples, tiny_llama)
        assert leftovers(spool_of(server)) == []


def test_the_server_is_killed_again_and_again_under_one_client(tiny_llama: Path, tmp_path: Path) -> None:
    samples = token_samples(400, 2048, seed=22)
    rows, out = write_rows(tmp_path / "rows.jsonl", samples), tmp_path / "store"
    moments = random.Random(6)
    with SglangServer(model=tiny_llama, log=tmp_path / "server.log") as server:
        with (tmp_path / "client.log").open("w") as log:
            client = subprocess.Popen(extract_command(rows, server.url, out), stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for_shard(out, 0, client)  # a client that has not seen the server yet would rightly end
            for _ in range(KILLS):
                time.sleep(moments.uniform(0.5, 3.0))
                dead_spool = spool_of(server)
                server.kill()
                server.start()
            # A server's death costs no sample a try: however many there were, all are committed.
            assert client.wait(timeout=300) == 0, (tmp_path / "client.log").read_text()
        finally:
            client.kill()
            client.wait()
        check_union(out, samples, tiny_llama)
        assert leftovers(spool_of(server)) == []
        assert not dead_spool.exists()
    ours = [path for path in SHARED_MEMORY.glob(f"{PREFIX}*") if path.stat().st_uid == os.getuid()]
    assert spool_is_gone(ours, server.port)


def spool_is_gone(spools: list[Path], port: int) -> bool:
    return not any(
        json.loads(path.read_text())["port"] == port for root in spools for path in root.glob("server-*.json")
    )
