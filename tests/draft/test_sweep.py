"""`hsdump bench --sweep`: a server for each setting, started and ended, and the settings that it was started with."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from hsdump.cli.main import main
from hsdump.demo.run import TARGET
from hsdump.draft.bench import Speed
from hsdump.draft.sweep import Launch, Setting, Sweep, Swept, parse_settings, sweep
from hsdump.errors import ServerError, UsageError

SERVER = """
import json, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

port, steps, topk, tokens = map(int, sys.argv[1:5])

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send({"data": [{"id": "demo", "owned_by": "sglang"}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        counts = {"spec_verify_ct": 12 // steps} if steps else {}
        self.send({"text": "", "meta_info": {"completion_tokens": 12, **counts}})

    def send(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass

signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
"""Says twelve tokens in as many rounds as its steps leave."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_settings() -> None:
    assert parse_settings("3:1,5:4:16") == [Setting(steps=3, topk=1, tokens=4), Setting(steps=5, topk=4, tokens=16)]
    for bad in ("3", "3:4", "0:1:1", "a:1:2", "1:2:3:4"):
        with pytest.raises(UsageError, match="is no setting"):
            parse_settings(bad)


def test_each_setting_has_its_own_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "questions.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "def f():"}]}))
    port = free_port()
    start = f"{sys.executable} {tmp_path / 'server.py'} {port}"
    words = ["bench", "--server", f"http://127.0.0.1:{port}", "--prompts", str(tmp_path / "questions.jsonl")]
    words += ["--model", str(TARGET), "--concurrency", "1", "--sweep", "2:1,4:2:8"]
    words += ["--launch", start + " {steps} {topk} {tokens}", "--launch-baseline", start + " 0 0 0"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["command"].split()[-3:] for one in found["settings"]] == [["2", "1", "3"], ["4", "2", "8"]]
    assert [one["rows"][0]["acceptance_length"] for one in found["settings"]] == [2.0, 4.0]
    assert found["baseline"][0]["acceptance_length"] is None
    assert free_port() != port
    with socket.socket() as sock:
        assert sock.connect_ex(("127.0.0.1", port)) != 0, "a server was left behind"
    assert main([*words[:-4], "--sweep", "2:1"]) == UsageError.exit_code
    assert "--sweep and --launch belong together" in capsys.readouterr().err


def test_what_cannot_be_swept(tmp_path: Path) -> None:
    port = free_port()
    launch = Launch(url=f"http://127.0.0.1:{port}", command="true", log=tmp_path / "log")
    settings = parse_settings("2:1")
    with pytest.raises(UsageError, match="has no place for a setting"):
        sweep(launch, settings, [[1]])
    broken = Launch(url=launch.url, command="sh -c 'echo no {steps} GPU; exit 4'", log=tmp_path / "log")
    with pytest.raises(ServerError, match=r"ended with code 4 before it answered: no 2 GPU"):
        sweep(broken, settings, [[1]])
    missing = Launch(url=launch.url, command="/nowhere/server {steps}", log=tmp_path / "log")
    with pytest.raises(UsageError, match="cannot be started"):
        sweep(missing, settings, [[1]])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        assert sweep is not None


def test_the_fastest_by_load() -> None:
    def rows(*speeds: float) -> list[Speed]:
        return [
            Speed(concurrency=number, requests=1, failed=0, tokens=1, seconds=1.0, tokens_per_s=speed)
            for number, speed in zip((1, 16), speeds, strict=True)
        ]

    one = Swept(setting=Setting(steps=3, topk=1, tokens=4), command="", rows=rows(300, 500))
    found = Sweep(server="", engine="sglang", settings=[one], baseline=rows(200, 600))
    assert found.best() == {1: "3:1:4", 16: "without"}
