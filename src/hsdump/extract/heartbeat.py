"""`run.json` beside a store: what the writing run says of itself, for `hsdump status` from another terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hsdump.errors import StoreError
from hsdump.extract.state import RunState
from hsdump.locks import is_held
from hsdump.store import Store
from hsdump.store.format import LOCK_NAME, RUN_NAME
from hsdump.store.index import utc_now


class Heartbeat:
    """Writes the file now and then. Not durable, never in the way: a full disk costs the file, not the run."""

    def __init__(self, store: Path, state: RunState) -> None:
        self._path, self._state, self._started = store / RUN_NAME, state, utc_now()
        self._lock = threading.Lock()
        self._is_over = False

    async def beat(self) -> None:
        """Write it, and let the run go on meanwhile: beside shards on their way a rename was seen to take 0.8 s."""
        await asyncio.to_thread(self._write, self._facts())

    def last_beat(self) -> None:
        """Write it for good: what may be under way comes before it, or not at all."""
        self._write(self._facts(), last=True)

    def _facts(self) -> dict[str, Any] | None:
        state = self._state
        if not state.is_open:
            return None
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": self._started,
            "updated": utc_now(),
            "in_flight": state.in_flight,
            "in_flight_tokens": state.in_flight_tokens,
            "waiting": state.waiting,
            "captured": state.captured,
            "captured_tokens": state.captured_tokens,
            "to_do": state.to_do,
            "disk_free": state.disk_free,
            **state.report(),
        }

    def _write(self, facts: dict[str, Any] | None, *, last: bool = False) -> None:
        partial = self._path.with_name(self._path.name + ".partial")
        with self._lock, contextlib.suppress(OSError):
            if facts is None or self._is_over:
                return
            self._is_over = last
            partial.write_bytes(msgspec.json.encode(facts))
            partial.replace(self._path)


IN_BETWEEN = ("pending", "sent", "captured")
"""States of a sample that is neither committed nor failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreStatus:
    """A store and its run, seen from outside."""

    store: str
    running: bool
    """A living process on this host writes it."""

    committed: int
    tokens: int
    states: dict[str, int]
    """`pending`, `sent`, `captured` of the run's samples in between, `committed`, and `failed`."""

    failed: dict[str, int]
    skipped: dict[str, int]
    run: dict[str, Any] | None
    """What the run wrote last; None where there was none."""


def store_status(path: Path) -> StoreStatus:
    """Look at a store that a run may be writing, without disturbing it.

    Raises:
        StoreError: no store is there.
    """
    with Store(path) as store:
        committed, tokens, _ = store.totals()
        failures, skips, requests = store.failures(), store.skips(), store.requests()
    states = {name: sum(row.state == name for row in requests) for name in IN_BETWEEN}
    failed: dict[str, int] = {}
    for failure in failures.values():
        failed[failure.reason] = failed.get(failure.reason, 0) + 1
    return StoreStatus(
        store=str(path),
        running=is_held(path / LOCK_NAME),
        committed=committed,
        tokens=tokens,
        states={**states, "committed": committed, "failed": len(failures)},
        failed=failed,
        skipped=dict(skips),
        run=_read_run(path),
    )


def _read_run(path: Path) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode((path / RUN_NAME).read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise StoreError(
            f"{path / RUN_NAME} cannot be read: {error}", "remove it; the store does not need it"
        ) from error
