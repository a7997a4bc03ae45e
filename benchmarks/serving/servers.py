"""Starting the real SGLang for a benchmark, on a GPU or on a CPU with tiny shapes."""

from __future__ import annotations

import os
import signal
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
    started: list[str] = field(default_factory=list)

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
        port = 31000 + 50 * len(target.started)  # SGLang takes some more beside it
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
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(url, process, log, wait_s)
        print(f"[{name}] up after {time.monotonic() - begin:.0f} s", flush=True)
        yield url
    finally:
        _stop(process)


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
