"""What the server side tells a client, through files in the spool: what it offers, or why it offers nothing."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hsdump.locks import TRIES, AliveLock, left_behind
from hsdump.schema import EngineInfo
from hsdump.spool.names import SpoolPaths


class Announcement:
    """One capturing process's file in the spool, valid while its lock is held, which is while the process lives."""

    def __init__(self, root: Path) -> None:
        """Make the spool's folders, readable by this user only: states and tokens are people's conversations."""
        self._paths = SpoolPaths(root)
        self._lock = self._move_in()

    def _move_in(self) -> AliveLock:
        """Again where a sweep of what was there before takes the folder away at this moment."""
        for _ in range(TRIES):
            self._paths.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                lock = AliveLock(self._paths.server_lock(os.getpid()))
            except FileNotFoundError:
                continue
            try:
                for folder in self._paths.folders():
                    folder.mkdir(mode=0o700, exist_ok=True)
                self._remove_dead()
                if lock.in_place and all(folder.is_dir() for folder in self._paths.folders()):
                    return lock
            except FileNotFoundError:
                pass
            except BaseException:
                lock.release()
                raise
            lock.release()
        raise OSError(f"{self._paths.root} is removed again and again")

    def _remove_dead(self) -> None:
        """Take away what killed processes of this spool left: a ring is gigabytes of memory.

        Those take longer to remove than a process waits for its lock, and a container that starts again gives the same
        numbers to its processes. So the ring only gets another name while the lock is held.
        """
        for lock in list(self._paths.root.glob("server-*.lock")):
            if not lock.stem.removeprefix("server-").isdecimal():
                continue
            number = int(lock.stem.removeprefix("server-"))
            with left_behind(lock) as dead:
                if dead:
                    with contextlib.suppress(FileNotFoundError):
                        self._paths.ring(number).rename(self._paths.dead_ring(number))
                    for path in (self._paths.server_file(number), lock):
                        path.unlink(missing_ok=True)
        for ring in list(self._paths.root.glob(self._paths.dead_ring("*").name)):
            ring.unlink(missing_ok=True)

    def offer(self, info: EngineInfo, *, host: str, port: int, ring: str | None = None) -> None:
        """Say what is captured here, and through which ring file of the spool."""
        self._write({"info": asdict(info), "host": host, "port": port, "ring": ring})

    def decline(self, reason: str, *, host: str = "", port: int = 0) -> None:
        """Say why nothing is captured here. The server itself goes on without hsdump."""
        self._write({"declined": reason, "host": host, "port": port})

    def _write(self, facts: dict[str, Any]) -> None:
        path = self._paths.server_file(os.getpid())
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({**facts, "pid": os.getpid()}))
        partial.rename(path)
