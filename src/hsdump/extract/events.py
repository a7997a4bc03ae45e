"""What happens during a run, as it happens: for logs, for `--json-log`, and for whoever drives a collector."""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hsdump.errors import UsageError

Listener = Callable[[str, dict[str, Any]], None]
"""Called with the kind of an event and its facts, from the run's event loop or its store thread. Must not block."""


@dataclass(slots=True)
class Events:
    """Hands every event to every listener.

    Kinds: `started`, `committed`, `failed`, `skipped`, `retried`, `server-away`, `server-back`, `server-refused`,
    `stopped`, `progress`, `ended`.
    """

    listeners: list[Listener] = field(default_factory=list)

    def __call__(self, kind: str, **facts: Any) -> None:
        for listener in self.listeners:
            listener(kind, facts)


class JsonLog:
    """Events as JSON, a line each, appended and flushed at once: whoever follows the file sees whole lines.

    By a thread of its own: beside shards on their way a disk was seen to take 0.8 s for a small file.
    """

    def __init__(self, path: Path) -> None:
        """Raises:
        UsageError: the file cannot be written.
        """
        try:
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
        except OSError as error:
            raise UsageError(f"--json-log {path} cannot be written: {error.strerror}", "name another file") from error
        self._ended = False
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="hsdump-json-log", daemon=True)
        self._thread.start()

    def __call__(self, kind: str, facts: dict[str, Any]) -> None:
        if self._ended:
            return
        at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        # The wall clock may jump; the other one says what came after what.
        line = {"at": at, "monotonic_s": round(time.monotonic(), 3), "event": kind, **facts}
        self._lines.put(json.dumps(line, ensure_ascii=False, default=str) + "\n")

    def close(self) -> None:
        """Write what is left."""
        self._lines.put(None)
        self._thread.join()

    def _write(self) -> None:
        try:
            with self._file:
                while (line := self._lines.get()) is not None:
                    self._file.write(line)
        except OSError as error:  # the run itself is worth more than its log
            self._ended = True
            sys.stderr.write(f"hsdump: --json-log {self._file.name} ends here: {error.strerror}\n")
