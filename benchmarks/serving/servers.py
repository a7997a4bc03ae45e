"""Starting the real SGLang for a benchmark, on a GPU or on a CPU with tiny shapes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

GPU_ARGS = (
    "--skip-tokenizer-init --attention-backend triton --sampling-backend pytorch --grammar-backend none "
    "--disable-flashinfer-autotune --mm-feature-transport cpu --skip-server-warmup "
    "--mem-fraction-static 0.7 --host 127.0.0.1"
)
CPU_ARGS = (
    "--skip-tokenizer-init --device cpu --attention-backend torch_native --skip-server-warmup "
    "--mem-fraction-static 0.5 --max-total-tokens 40000 --host 127.0.0.1"
)

MADE_UP_ARGS = ("--load-format", "dummy", "--disable-radix-cache")
"""For measurements with random weights and random tokens."""

PORTS_APART = 50
"""SGLang takes some more beside its own."""

_PORTS = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where servers run and how they find SGLang."""

    device: str
    python: str = sys.executable
    pythonpath: str = ""
    """With folders of test plugins before it, where a mode needs one."""

    made_up: bool = True
    """Random weights; False: the checkpoint's, and a server as anybody runs it."""

    log_dir: Path = Path("/tmp")
    first_port: int = 31000
    pid_file: Path | None = None
    """Where running servers are noted, so that `end_left_over` finds those that a kill of this process left."""

    started: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)

    @property
    def args(self) -> list[str]:
        args = (GPU_ARGS if self.device == "cuda" else CPU_ARGS).split()
        return [*args, *MADE_UP_ARGS] if self.made_up else args

    def env(self, extra: dict[str, str]) -> dict[str, str]:
        env = {**os.environ, "PYTHONPATH": self.pythonpath}
        if self.device == "cpu":
            env |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
        return {**env, **extra}


@contextmanager
def server(
    target: Target,
    name: str,
    model: Path,
    flags: list[str],
    *,
    serve: list[str] | None = None,
    env: dict[str, str] | None = None,
    wait_s: float = 240.0,
) -> Iterator[str]:
    """Run one server. `serve`: options of `hsdump serve`, or None for a server without capture."""
    with _PORTS:
        port = free_port(target.ports[-1] + PORTS_APART if target.ports else target.first_port)
        target.ports.append(port)
        target.started.append(name)
    args = [*target.args, "--model-path", str(model), "--port", str(port), *flags]
    command = [target.python, "-m", "sglang.launch_server", *args]
    if serve is not None:
        command = [sys.executable, "-m", "hsdump.cli.main", "serve", "--python", target.python, *serve, "--", *args]
    log = target.log_dir / f"server-{name}.log"
    begin = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=target.env(env or {}), start_new_session=True, stdout=out, stderr=subprocess.STDOUT
        )
    _note(target.pid_file, process.pid)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(url, process, log, wait_s)
        print(f"[{name}] up after {time.monotonic() - begin:.0f} s", flush=True)
        yield url
    finally:
        _stop(process)
        _note(target.pid_file, process.pid, gone=True)


def free_port(first: int) -> int:
    """Give the first port from here on, in steps, that nobody listens on: another's /health would pass for ours."""
    for port in range(first, first + 100 * PORTS_APART, PORTS_APART):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was left a minute ago is free
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                print(f"port {port} is taken", flush=True)
                continue
            return port
    raise RuntimeError(f"no free port from {first} on")


def _note(path: Path | None, pid: int, *, gone: bool = False) -> None:
    if path is None:
        return
    with _PORTS:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        lines = [line for line in lines if line.split()[0] != str(pid)]
        if not gone:
            lines.append(f"{pid} {_status(pid).get('started', '-')}")
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def end_left_over(path: Path) -> list[int]:
    """Kill servers that an earlier call noted and did not stop, with all that they started; gives their ids."""
    ended = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for leader, started in (line.split() for line in lines):
        now = _status(int(leader))
        if now and now["started"] != started:
            continue  # the number is another process's by now
        for pid in _family(int(leader)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                ended.append(pid)
    path.unlink(missing_ok=True)
    return ended


def _family(leader: int) -> list[int]:
    """Give the processes of a leader's session, and all that descend from them in sessions of their own."""
    every = {int(entry.name): _status(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    family = {pid for pid, status in every.items() if status and (pid == leader or status["session"] == str(leader))}
    while more := {pid for pid, status in every.items() if status and int(status["parent"]) in family} - family:
        family |= more
    return sorted(family)


def _status(pid: int) -> dict[str, str]:
    """Give parent, session and start time of a process; nothing where it is gone."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return {}
    return {} if words[0] == "Z" else {"parent": words[1], "session": words[3], "started": words[19]}


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"no server; end of {log}:\n{log.read_text(errors='replace')[-5000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number, wait in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            continue
    time.sleep(1.0)
