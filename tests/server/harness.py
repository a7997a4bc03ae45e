"""Starting and stopping the real SGLang on a CPU, through `hsdump serve` or as anybody would.

A server is its own process group, so that stopping it can never touch anything else, and never leaves a scheduler
behind.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
SGLANG_PYTHON = Path(os.environ.get("HSDUMP_SGLANG_PYTHON") or ROOT / ".venv-sglang/bin/python")
CACHE = ROOT / ".cache"
START_LIMIT_S = 240.0
START_TRIES = 3
"""A port is chosen long before the server listens on it, and another program may be quicker."""

PORT_IN_USE = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)
STOP_LIMIT_S = 30.0
PR_SET_PDEATHSIG = 1

_CPU_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONDONTWRITEBYTECODE": "",
    # Two threads that wait for each other, spinning, are far slower than one when the cores are shared.
    "OMP_NUM_THREADS": "1",
}
# --max-total-tokens bounds the memory; the fraction is only as large as to leave room for what else the machine does.
_CPU_ARGS = (
    *("--device", "cpu", "--host", "127.0.0.1", "--attention-backend", "torch_native"),
    *("--mem-fraction-static", "0.5", "--max-total-tokens", "20000"),
    "--sleep-on-idle",  # an idle scheduler spins otherwise, and two cores are few
)
_MODELS = ("llama", "llama_eagle3", "qwen3", "gemma3_causal", "deepseek_v2")
"""SGLang's modules for the tiny models and a drafter. It imports all 250 otherwise: 4 s of CPU time a start."""

_MLA_PLUGIN = Path(__file__).parent / "mla_on_cpu"
"""A test-only plugin: SGLang's default MLA path cannot run on torch_native."""
_QUICK_START = Path(__file__).parent / "quick_start"
"""Another one: a third of a start's imports less."""


@dataclass(kw_only=True)
class SglangServer:
    """One real server, from `with` to the end of the block."""

    model: Path
    log: Path
    """Its output goes here; read it when something fails."""

    capture: bool = True
    """Through `hsdump serve`; False: plain `python -m sglang.launch_server`."""

    verb: str = "serve"
    """Or `run`, which patches, serves and restores."""

    serve_options: tuple[str, ...] = ()
    sglang_args: tuple[str, ...] = ("--chunked-prefill-size", "64")
    version: str | None = None
    """Another release than the installed one: a folder name under `.cache/sglang-<version>`."""

    tree: Path | None = None
    """Another release, unpacked into this folder."""

    warm_up: bool = False
    """With SGLang's own warm-up request, which makes the start slower."""

    stop_with: signal.Signals = signal.SIGINT
    """On SIGTERM SGLang first waits up to 10 s for requests that may still be running; Ctrl-C takes one second."""

    stop_limit_s: float = STOP_LIMIT_S
    tp: int = 1
    env: dict[str, str] = field(default_factory=dict)
    port: int = 0
    ports_in_use: int = 0
    """Starts that met a port in use, and were made again with another one inside."""

    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> SglangServer:  # noqa: PYI034 - typing.Self is 3.11
        self.port = self.port or free_port()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and wait until it serves; again when a port was in use."""
        for left in reversed(range(START_TRIES)):
            before = self.log.stat().st_size if self.log.exists() else 0
            self._launch()
            if self._is_up_at_last():
                return
            text = self.log.read_bytes()[before:].decode(errors="replace")
            self.stop()
            if not left or not PORT_IN_USE.search(text):
                raise RuntimeError(f"the server did not come up; the end of its log:\n{text[-4000:]}")
            self.ports_in_use += 1

    def command(self) -> list[str]:
        """Give the command that starts it, for an environment as `environment` gives it."""
        args = [*_CPU_ARGS, "--model-path", str(self.model), "--port", str(self.port), *self.sglang_args]
        args += ["--nccl-port", str(free_port(first=30000, count=270))]
        if not self.warm_up:
            args.append("--skip-server-warmup")
        if self.tp > 1:
            args += ["--tp", str(self.tp), "--disable-custom-all-reduce"]
        command = [str(SGLANG_PYTHON), "-m", "sglang.launch_server", *args]
        if self.capture:
            serve = [self.verb, "--python", str(SGLANG_PYTHON), *self.serve_options, "--", *args]
            command = [sys.executable, "-m", "hsdump.cli.main", *serve]
        return command

    def _launch(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                env=self.environment(),
                start_new_session=True,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - one prctl, no thread of this process matters to it
            )

    def stop(self) -> None:
        """End it as an operator would; whatever is left after a while is killed."""
        self._end(self.stop_with)

    def kill(self) -> None:
        """Kill -9 the whole server, launcher included."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        if process.poll() is None:
            send = os.killpg if number is signal.SIGKILL else os.kill
            send(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(self.stop_limit_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def environment(self) -> dict[str, str]:
        """Give the environment that it starts in."""
        env = {**os.environ, **_CPU_ENV, "SGLANG_DISABLED_MODEL_ARCHS": self._unused_models(), **self.env}
        path = [str(_MLA_PLUGIN), str(_QUICK_START)]
        if self.tree is not None:
            path = [str(self.tree), *path]
        if self.version is not None:
            path = [str(CACHE / f"sglang-{self.version}"), str(CACHE / "sglang-overlay"), *path]
        if self.tp > 1:
            threads = "|".join(str(cpu % (os.cpu_count() or 1)) for cpu in range(self.tp))
            env |= {"SGLANG_CPU_OMP_THREADS_BIND": threads, "SGLANG_NCCL_SO_PATH": "/nonexistent.so"}
        return {**env, "PYTHONPATH": os.pathsep.join(path)}

    def _unused_models(self) -> str:
        """Name this release's model modules that no test serves."""
        installed = "lib/python*/site-packages/sglang/srt/models/*.py"
        environment, release = SGLANG_PYTHON.parents[1], self.tree or CACHE / f"sglang-{self.version}"
        plain = self.version is None and self.tree is None
        files = environment.glob(installed) if plain else release.glob("sglang/srt/models/*.py")
        return ",".join(sorted({path.stem for path in files} - {*_MODELS, "__init__"}))

    def _is_up_at_last(self) -> bool:
        assert self.process is not None
        deadline = time.monotonic() + START_LIMIT_S
        with httpx.Client(timeout=5) as client:  # one for all tries: each new one reads the certificates again
            while time.monotonic() < deadline and self.process.poll() is None:
                try:
                    if client.get(f"{self.url}/health").status_code == httpx.codes.OK:
                        return True
                except httpx.TransportError:
                    pass
                time.sleep(0.3)
        return False


def _end_with_parent() -> None:
    """Have the kernel end the server when the test run is killed: nothing may stay behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port(first: int = 20000, count: int = 1000) -> int:
    """Find a free port below those that the kernel gives away, and low enough for the ports that SGLang adds to it.

    SGLang 0.5.11 refuses to start when port + 10,000 is not a port. Tests that run side by side have their own ranges
    of so many ports each, since a port is free until its server, half a minute later, listens on it. The port of the
    processes among themselves comes from above 30,000: SGLang would choose it between 22,000 and 30,000.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 10
    while True:
        port = first + count * worker + random.randrange(count)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
