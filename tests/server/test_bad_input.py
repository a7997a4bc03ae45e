"""What can be wrong with rows, options, folders and servers: each has its name, its remedy, and no stack trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.server.driving import stored, token_samples, write_rows
from tests.server.harness import SglangServer

pytestmark = pytest.mark.server

SMALL_SPOOL = 1 << 20
"""Takes a sample of about 400 tokens of the tiny model (2,056 bytes a token), and no longer one."""


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    log = tmp_path_factory.mktemp("bad-input") / "server.log"
    options = ("--spool-bytes", str(SMALL_SPOOL))
    with SglangServer(model=tiny_llama, log=log, serve_options=options) as running:
        yield running


def extract(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hsdump.cli.main", "extract", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert "Traceback" not in done.stderr
    return done


def test_every_bad_row_is_named_and_the_good_ones_are_captured(server: SglangServer, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    good = {
        "messages": [{"role": "user", "content": "What is two plus two?"}, {"role": "assistant", "content": "Four."}]
    }
    alien = {"messages": [{"role": "alien", "content": "?"}, {"role": "assistant", "content": "Four."}]}
    lines = [
        json.dumps(good),
        json.dumps({"messages": []}),
        json.dumps(alien),
        json.dumps({"id": "long", "input_ids": rng.integers(3, 2048, 5000).tolist()}),
        json.dumps({"id": "outside", "input_ids": [5, 2048, 7]}),
        '{"input_ids": [5, 6',
        json.dumps({"id": "no-room", "input_ids": rng.integers(3, 2048, 900).tolist()}),
        json.dumps({"input_ids": [5, 6, 7], "loss_mask": [1, 1]}),
    ]
    rows, out = tmp_path / "rows.jsonl", tmp_path / "store"
    rows.write_text("\n".join(lines) + "\n")
    done = extract(rows, "--server", server.url, "--out", out, "--json")
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_code"] == 3
    assert report["committed"] == 1
    assert report["failed"] == {"larger-than-spool": 1}
    assert report["skipped"].keys() >= {"empty", "too-long", "bad-json", "token-outside-vocabulary"}
    assert sum(report["skipped"].values()) == 6
    _, states, _ = stored(out)
    assert len(states) == 1
    again = json.loads(extract(rows, "--server", server.url, "--out", out, "--json").stdout)
    assert (again["already_committed"], again["failed_earlier"], again["committed"]) == (1, 1, 0)


def test_a_full_spool_delays_and_never_loses(server: SglangServer, tmp_path: Path) -> None:
    """Sixty samples of up to half a spool each, sixteen slots: admission by bytes keeps all of them within it."""
    samples = token_samples(60, 2048, seed=31, longest=200)
    rows = write_rows(tmp_path / "rows.jsonl", samples)
    done = extract(rows, "--server", server.url, "--out", tmp_path / "store", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
    assert report["committed"] == len(samples)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--layers", "2,99"], 64, r"layers [99] are outside this model of 8 layers"),
        (["--layers", "3"], 64, "the server captures layers [2, 4, 5]"),
        (["--layers", "two"], 64, "is not a list of numbers"),
        (["--turns", "some"], 64, "--turns some is not known"),
        (["--model", "/nowhere"], 65, "/nowhere"),
    ],
)
def test_options_that_cannot_work(
    server: SglangServer, tmp_path: Path, options: list[str], code: int, message: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    done = extract(rows, "--server", server.url, "--out", tmp_path / "store", *options)
    assert message in done.stderr
    assert "fix:" in done.stderr
    assert done.returncode == code
    assert not (tmp_path / "store").exists()


def test_a_store_made_with_other_layers_is_refused_with_the_difference(server: SglangServer, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", token_samples(2, 2048))
    assert extract(rows, "--server", server.url, "--out", tmp_path / "store", "--layers", "2,4").returncode == 0
    done = extract(rows, "--server", server.url, "--out", tmp_path / "store")
    assert done.returncode == 75
    assert "[2, 4]" in done.stderr
    assert "[2, 4, 5]" in done.stderr


def test_no_input_file_and_no_server(server: SglangServer, tmp_path: Path) -> None:
    done = extract(tmp_path / "nothing.jsonl", "--server", server.url, "--out", tmp_path / "store")
    assert done.returncode == 65
    assert "nothing.jsonl does not exist" in done.stderr
    rows = write_rows(tmp_path / "rows.jsonl", token_samples(2, 2048))
    done = extract(rows, "--server", "http://127.0.0.1:9", "--out", tmp_path / "store")
    assert done.returncode == 69
    assert "nothing answers at http://127.0.0.1:9" in done.stderr


def test_a_folder_that_cannot_be_written_is_refused_before_any_request(tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir()
    rows = write_rows(tmp_path / "rows.jsonl", token_samples(2, 2048))
    with read_only(folder):
        done = extract(rows, "--server", "http://127.0.0.1:9", "--out", folder / "store")
    assert done.returncode == 74
    assert "is not writable" in done.stderr
    (tmp_path / "file").write_text("")
    done = extract(rows, "--server", "http://127.0.0.1:9", "--out", tmp_path / "file")
    assert done.returncode == 74
    assert "is a file" in done.stderr


def test_a_server_that_is_not_sglang(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", token_samples(2, 2048))
    with other_server() as url:
        done = extract(rows, "--server", url, "--out", tmp_path / "store")
    assert done.returncode == 69
    assert "answers, but not as an SGLang server" in done.stderr


def test_a_server_without_capture_says_how_to_get_it(tiny_llama: Path, tmp_path: Path, server: SglangServer) -> None:
    """Another server's live spool on this host must not be taken for this one's."""
    rows = write_rows(tmp_path / "rows.jsonl", token_samples(2, 2048))
    with SglangServer(model=tiny_llama, log=tmp_path / "plain.log", capture=False) as plain:
        done = extract(rows, "--server", plain.url, "--out", tmp_path / "store")
    assert done.returncode == 69
    assert "hsdump serve" in done.stderr
    assert not (tmp_path / "store").exists()
    assert extract(rows, "--server", server.url, "--out", tmp_path / "store").returncode == 0


def test_a_server_whose_capture_cannot_work_serves_on_and_says_why(tiny_llama: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", token_samples(2, 2048))
    options = ("--layers", "2,99")
    with SglangServer(model=tiny_llama, log=tmp_path / "s.log", serve_options=options) as declined:
        done = extract(rows, "--server", declined.url, "--out", tmp_path / "store")
    assert done.returncode == 69
    assert "runs, but captures nothing" in done.stderr
    assert "layers [99] are outside this model of 8 layers" in done.stderr


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make a folder unwritable, for root too."""
    if os.geteuid() != 0:
        folder.chmod(0o555)
        yield
        folder.chmod(0o755)
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"hello": "world"}')

    def log_message(self, *_: Any) -> None:
        return


@contextmanager
def other_server() -> Iterator[str]:
    web = ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{web.server_address[1]}"
    finally:
        web.shutdown()
        thread.join()
        web.server_close()
