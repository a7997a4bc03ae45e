"""Locks that say "this process is alive": the kernel drops them when the process dies, kill -9 included.

Standard library only: server and client side import it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TRIES = 10
PAUSE_S = 0.02
"""Others look at a lock by taking it for a moment; that must not refuse its owner."""


def take(fd: int) -> bool:
    """Take an exclusive `flock` on an open file; False when somebody keeps it."""
    for attempt in range(TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt + 1 < TRIES:
                time.sleep(PAUSE_S)
        else:
            return True
    return False


class AliveLock:
    """An exclusive `flock` on a small file, held until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        """Take the lock.

        Raises:
            BlockingIOError: a living process holds it.
            OSError: the file cannot be made.
        """
        self.path = path
        self._fd: int | None = _open_locked(path)
        os.truncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Give it back and remove the file, if it is still this one."""
        if self._fd is not None:
            if self.in_place:
                self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = None

    @property
    def in_place(self) -> bool:
        """Whether others see it: nobody removed its file, or the folder around it."""
        return self._fd is not None and _is_at(self.path, self._fd)


def _open_locked(path: Path) -> int:
    for _ in range(TRIES):
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        taken = take(fd)
        if taken and _is_at(path, fd):
            return fd
        # Between opening and locking, somebody may have taken the unlocked file for a dead process's, and removed it or
        # moved its folder away: then whoever holds that one does not hold ours.
        held = not taken and _is_at(path, fd)
        os.close(fd)
        if held:
            raise BlockingIOError(f"a living process holds {path}")
    raise OSError(f"{path} is removed again and again, or its file system has no lasting inodes")


def _is_at(path: Path, fd: int) -> bool:
    """Tell whether the file at `path` is still the open one."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


@contextmanager
def left_behind(path: Path) -> Iterator[bool]:
    """Hold a dead process's lock while what it left is removed, the file at `path` included.

    A process that is just taking the lock waits for that, and then finds its file gone and makes it again. Removing
    without holding would take the file from under a process that has it by now, which then counts as dead.

    Yields:
        False when a living process holds it, or there is no such file; then nothing is to be removed.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        dead = _is_at(path, fd)
    except BlockingIOError:
        dead = False
    try:
        yield dead
    finally:
        os.close(fd)


def is_held(path: Path) -> bool:
    """Tell whether a living process holds the lock at `path`.

    A missing file counts as free, and one of another user as held: nobody here can know better.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except PermissionError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
