"""`hsdump bench --sweep`: the same questions to one server after another, each started with other settings of drafts.

How many steps, branches and draft tokens are best depends on the target, the drafter, the device and the load; engines
take them at the start only. So the server is started by its own command, once for each setting, and ended again.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from hsdump.draft.bench import CONCURRENCIES, Speed, bench
from hsdump.errors import ServerError, UsageError

POLL_S = 0.5
STOP_S = 30.0
LAST_LINES = 5


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What a draft looks like."""

    steps: int
    topk: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.steps}:{self.topk}:{self.tokens}"


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """One setting's server."""

    setting: Setting
    command: str
    rows: list[Speed]


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """All settings, and the server without a drafter."""

    server: str
    engine: str
    settings: list[Swept]
    baseline: list[Speed] = []

    def best(self) -> dict[int, str]:
        """The fastest setting by requests in flight; `without` where no drafter is faster than each."""
        speeds = [(row, "without") for row in self.baseline]
        speeds += [(row, str(one.setting)) for one in self.settings for row in one.rows]
        found: dict[int, tuple[float, str]] = {}
        for row, name in speeds:
            found[row.concurrency] = max(found.get(row.concurrency, (-1.0, "")), (row.tokens_per_s, name))
        return {number: name for number, (_, name) in found.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How to start servers."""

    url: str
    command: str
    """With `{steps}`, `{topk}` and `{tokens}` where they go."""

    baseline: str | None = None
    """The command without a drafter."""

    log: Path
    limit_s: float = 900.0
    """Longest start."""

    say: Callable[[str], None] = lambda _line: None
    """Told each command before it runs."""


def parse_settings(text: str) -> list[Setting]:
    """Read `steps:topk:tokens`, several with commas between; tokens may be left out for chains (topk 1).

    Raises:
        UsageError: something else.
    """
    found = []
    for word in text.split(","):
        try:
            parts = [int(part) for part in word.split(":")]
        except ValueError:
            parts = []
        if len(parts) == 2 and parts[1] == 1:
            parts.append(parts[0] + 1)  # a chain and the token it begins behind
        if len(parts) != 3 or min(parts) < 1:
            fix = "write steps:topk:tokens, several with commas, such as 2:1:3,3:1:4,5:4:16"
            raise UsageError(f"--sweep {word!r} is no setting", fix)
        found.append(Setting(steps=parts[0], topk=parts[1], tokens=parts[2]))
    return found


def sweep(
    launch: Launch,
    settings: Sequence[Setting],
    prompts: Sequence[Sequence[int]],
    *,
    concurrencies: Sequence[int] = CONCURRENCIES,
    new_tokens: int = 128,
    key: str | None = None,
) -> Sweep:
    """Start, ask and end a server for each setting.

    Raises:
        UsageError: the command has no place for a setting, or something answers at the URL already.
        ServerError: a server did not start.
    """
    commands = [(setting, _filled(launch.command, setting)) for setting in settings]

    def measure(command: str) -> tuple[str, list[Speed]]:
        launch.say(f"$ {command}")
        with running(launch, command):
            found = bench(launch.url, prompts, concurrencies=concurrencies, new_tokens=new_tokens, key=key)
        return found.engine, found.rows

    engine, baseline = measure(launch.baseline) if launch.baseline else ("", [])
    swept = []
    for setting, command in commands:
        engine, rows = measure(command)
        swept.append(Swept(setting=setting, command=command, rows=rows))
    return Sweep(server=launch.url, engine=engine, settings=swept, baseline=baseline)


def _filled(command: str, setting: Setting) -> str:
    """Put a setting into a command. Other braces, such as those of JSON, stay as they are."""
    filled = command
    for name in ("steps", "topk", "tokens"):
        filled = filled.replace("{" + name + "}", str(getattr(setting, name)))
    if filled == command:
        fix = "write {steps}, {topk} and {tokens} where the settings go"
        raise UsageError(f"--launch has no place for a setting: {command}", fix)
    return filled


@contextmanager
def running(launch: Launch, command: str) -> Iterator[None]:
    """Have a server while the body runs. It is its own process group, so that ending it leaves nothing behind."""
    if _answers(launch.url):
        raise UsageError(f"something answers at {launch.url} already", "end it: --launch starts its own server there")
    with launch.log.open("ab") as log:
        try:
            child = subprocess.Popen(shlex.split(command), stdout=log, stderr=log, start_new_session=True)
        except (OSError, ValueError) as error:
            raise UsageError(f"--launch cannot be started: {error}", "see that the command works by itself") from error
    try:
        _wait(launch, child)
        yield
    finally:
        _end(child)


def _wait(launch: Launch, child: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + launch.limit_s
    while not _answers(launch.url):
        code = child.poll()
        if code is not None or time.monotonic() > until_s:
            what = "did not answer in time" if code is None else f"ended with code {code} before it answered"
            raise ServerError(f"the server {what}: {last_words(launch)}", f"see {launch.log}")
        time.sleep(POLL_S)


def last_words(launch: Launch) -> str:
    """Give the end of a server's log: of lines that speak of errors, where there are any."""
    lines = launch.log.read_text(encoding="utf-8", errors="replace").splitlines()
    telling = [line for line in lines if re.search(r"(Error|Exception): ", line)]
    return " | ".join((telling or lines)[-LAST_LINES:])


def _answers(url: str) -> bool:
    try:
        return httpx.get(url.rstrip("/") + "/v1/models", timeout=5).status_code < 500
    except httpx.HTTPError:
        return False


def _end(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        child.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
