"""One writer a store: a kernel lock that dies with its process."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from hsdump.errors import StoreBusy
from hsdump.locks import take


class WriterLock:
    """An exclusive `flock` on `writer.lock`, held until `release` or the end of the process, kill -9 included.

    The file stays: removing it would let a second process lock a new file while a third still holds the old one.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock.

        Raises:
            StoreBusy: a living process writes this store.
            OSError: the file cannot be made.
        """
        self._fd: int | None = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        if not take(self._fd):
            holder = os.pread(self._fd, 200, 0).decode(errors="replace").strip() or "a process that just started"
            os.close(self._fd)
            raise StoreBusy(
                f"{path.parent} is being written by {holder}",
                "wait for it to end, or write to another store and join them later with `hsdump store merge`",
            )
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Let the next writer in."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
