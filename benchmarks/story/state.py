"""What a story remembers between calls: figures of steps that are done, the time that is left, how commands are run."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.serving.servers import Target, server
from benchmarks.story.scale import Scale

QUIET = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
STOP_S = 10.0
START_S = {"cuda": 240.0, "cpu": 900.0}
"""A server that is not up by then will not be."""


CLEANING = threading.Event()
"""Set while `OutOfTime` makes its way up: a second one would interrupt the stopping of commands and servers."""


class OutOfTime(BaseException):
    """The call's time is over, or too short for a step; the next one goes on here.

    No `Exception`, so that none of the handlers for those takes it. asyncio drops it all the same where it arises in a
    callback of its loop: the alarm raises it again then.
    """


class Stopped(OutOfTime):
    """The alarm or a signal: nothing more is begun in this call."""


class StepFailed(Exception):
    """A command of the story failed."""


@dataclass(kw_only=True)
class Story:
    """One story on one machine."""

    scale: Scale
    device: str
    work: Path
    """Stays between calls: everything large."""

    out: Path
    """Results and logs: small."""

    target: Target
    until_s: float
    """`time.monotonic()` at which this call has to have ended."""

    llama: bool = False
    engine: str = "sglang"
    """`transformers`: without a server, in one process; the states are then transformers' own."""

    in_process: bool = False
    """Run hsdump's commands in this process: for a test, where a process each would take longer than the work."""

    text: Path | None = None
    model_path: Path | None = None
    """A target that exists already, instead of one trained here."""

    beside: str = ""
    """Of a second process with the same `work`: in the names of files that it alone writes."""

    wait_s: float = 0.0
    """How long a stage waits for what another process makes below `work`."""

    kinds: tuple[str, ...] = ()
    """Drafters of the lesson that this process trains; empty: all."""

    about: dict[str, Any] = field(default_factory=dict)
    """Machine, versions, command."""

    postponed: list[str] = field(default_factory=list)
    """What this call had no time for, or lacked something for that an earlier step makes."""

    failed: list[str] = field(default_factory=list)
    """Steps that failed in this call."""

    @property
    def data(self) -> Path:
        return self.work / "data"

    @property
    def model(self) -> Path:
        return self.model_path or self.work / "target/model"

    @property
    def answers(self) -> Path:
        return self.work / ("answers.parquet" if self.engine == "sglang" else "answers.jsonl")

    @property
    def store(self) -> Path:
        return self.work / "store"

    @property
    def drafter(self) -> Path:
        return self.work / "drafter"

    def left(self) -> float:
        """Seconds until this call has to have ended."""
        return self.until_s - time.monotonic()

    def need(self, seconds: float, what: str) -> None:
        """Go on only where there is time for it.

        Raises:
            OutOfTime: there is not.
        """
        if self.left() < seconds:
            raise OutOfTime(f"{what} needs {seconds:.0f} s, {max(self.left(), 0):.0f} s are left")

    def figures(self, name: str) -> dict[str, Any] | None:
        """Give what a step found, in this call or an earlier one."""
        path = self.work / "done" / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def step(self, name: str, needs_s: float, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Do something once: its figures are written when it is done, and given from there afterwards.

        `step_seconds` counts tries that were cut as well.

        Raises:
            OutOfTime: less than `needs_s` seconds are left.
        """
        found = self.figures(name)
        if found is not None:
            return found
        self.need(needs_s, name)
        begin = time.monotonic()
        print(f"[{name}] begins, {self.left():.0f} s are left", flush=True)
        cut = self.work / "cut" / f"{name}.json"
        before = float(json.loads(cut.read_text(encoding="utf-8"))) if cut.exists() else 0.0
        try:
            found = work()
        except OutOfTime:
            CLEANING.set()
            write(cut, round(before + time.monotonic() - begin, 2))
            raise
        found["step_seconds"] = round(before + time.monotonic() - begin, 2)
        write(self.work / "done" / f"{name}.json", found)
        self.publish()
        print(f"[{name}] {found['step_seconds']:.1f} s: {shorten(found)}", flush=True)
        return found

    def attempt(self, name: str, needs_s: float, work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Do a step that others do not wait for: where it fails, or there is no time for it, they go on.

        Raises:
            Stopped: this call is over.
        """
        try:
            return self.step(name, needs_s, work)
        except Stopped:
            raise
        except OutOfTime as over:
            self.postpone(name, over)
        except Exception as error:
            self.note(name, error)
        return None

    def postpone(self, name: str, why: object) -> None:
        """Leave something to a later call."""
        CLEANING.clear()
        self.postponed.append(f"{name}: {why}")
        print(f"[{name}] not in this call: {why}", flush=True)

    def note(self, name: str, error: BaseException) -> None:
        """Keep what failed, with the last line of its traceback, for the results: in them until the end."""
        traceback.print_exception(error)
        last = f"{type(error).__name__}: {error}".strip()
        last = last.replace(str(self.work), "WORK").replace(str(self.out), "OUT")
        if len(last) > 1500:  # a command's: what it was, and the end of what it said
            last = f"{last[:400]} [...] {last[-1000:]}"
        self.failed.append(name)
        path = self.work / f"errors{self.beside}.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        write(path, [*found, {"step": name, "call": len(self.about.get("commands", [])), "error": last}])
        self.publish()

    def publish(self) -> None:
        """Write all that is known so far to where results are kept: a call that is killed loses none of it."""
        done = sorted((self.work / "done").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        steps = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in done}
        noted = sorted(self.work.glob("errors*.json"))
        errors = [error for path in noted for error in json.loads(path.read_text(encoding="utf-8"))]
        told = {"scale": self.scale.name, "postponed": self.postponed, "errors": errors, "steps": steps}
        write(self.out / "story.json", {**self.about, **told})

    def hsdump(self, *words: object, codes: tuple[int, ...] = (0,)) -> dict[str, Any]:
        """Run one command as a user does; its report, with `exit_code` and `command_seconds` in it.

        Raises:
            OutOfTime: it was still running when this call had to end, and was stopped as by Ctrl-C.
            StepFailed: another exit code than those expected.
        """
        said = [str(word) for word in words]
        if self.in_process:
            return self._in_process(said, codes)
        command = [sys.executable, "-m", "hsdump.cli.main", *said, "--json"]
        log = self.work / f"logs/commands{self.beside}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        with log.open("a", encoding="utf-8") as errors:
            errors.write(f"\n$ hsdump {' '.join(said)}\n")
            errors.flush()
            said_from = log.stat().st_size
            process = subprocess.Popen(
                command, env={**os.environ, **QUIET}, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )
            try:
                output, _ = process.communicate(timeout=max(self.left(), 1.0))
            except subprocess.TimeoutExpired:
                raise OutOfTime(f"hsdump {said[0]} was stopped") from None
            finally:
                if process.poll() is None:
                    CLEANING.set()
                    stop(process)
        seconds = time.monotonic() - begin
        if process.returncode not in codes:
            end = log.read_bytes()[said_from:][-1500:].decode(errors="replace")
            shown = output[-1500:].decode(errors="replace")
            raise StepFailed(f"hsdump {' '.join(said)}: exit code {process.returncode}\n{shown}\n{end}")
        found = json.loads(output) if output.strip().startswith(b"{") else {}
        return {**found, "exit_code": process.returncode, "command_seconds": round(seconds, 2)}

    def _in_process(self, said: list[str], codes: tuple[int, ...]) -> dict[str, Any]:
        from hsdump.cli.main import main

        begin, output, errors = time.monotonic(), io.StringIO(), io.StringIO()
        with redirect_stdout(output), redirect_stderr(errors):
            code = main([*said, "--json"])
        if code not in codes:
            raise StepFailed(f"hsdump {' '.join(said)}: exit code {code}\n{output.getvalue()}\n{errors.getvalue()}")
        seconds = round(time.monotonic() - begin, 2)
        return {**json.loads(output.getvalue()), "exit_code": code, "command_seconds": seconds}

    def serve(self, name: str, *flags: str, capture: bool = False, layers: str = "auto") -> AbstractContextManager[str]:
        """Run one real SGLang with the target's weights, through `hsdump serve` or plain; gives its URL."""
        base = [*self.scale.server_flags, *flags]
        serve = None
        if capture:
            serve = ["--layers", layers, "--spool-bytes", str(self.scale.spool_bytes)]
        wait_s = min(self.left(), START_S[self.device])
        return server(self.target, name, self.model, base, serve=serve, wait_s=max(wait_s, 1.0))


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a command as Ctrl-C does, and after a while for good; only its own process group."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.communicate(timeout=STOP_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def write(path: Path, data: Any) -> None:
    """Write JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def shorten(found: dict[str, Any]) -> str:
    """Show the plain figures of a step on one line."""
    plain = {key: value for key, value in found.items() if isinstance(value, int | float | str) and key != "command"}
    return ", ".join(f"{key} {value}" for key, value in plain.items())[:600]


def afresh(folder: Path) -> Path:
    """Give a folder that holds nothing of an interrupted try."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder
