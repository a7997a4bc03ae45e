"""Every disk operation by which a store changes, in one place: tests put a failing disk here, later a remote one."""

from __future__ import annotations

import ctypes
import fcntl
import os
import queue
import shutil
import threading
from pathlib import Path
from typing import Any, final

WRITE_BACK_BYTES = 1 << 20
_SYNC_FILE_RANGE_WRITE = 2
_libc = ctypes.CDLL(None)


@final
class _WriteBack:
    """Has the kernel send what is dirty to the disk while more is written, in one thread for all files.

    Otherwise a whole shard waits for its fsync: on one machine 0.74 of 1.08 GB/s were left. And the call itself waits
    while the disk's queue is full, so that in the writing thread nothing was copied meanwhile: beside it, 1.5 times as
    much was committed (median of 8 pairs, two busy cores).

    A hint only: where the call is missing or fails, fsync does all of the work, and a descriptor that belongs to
    another file by then has that one written, which harms nobody.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._waiting: set[int] = set()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def start(self, fd: int) -> None:
        """Never waits."""
        if fd in self._waiting or not hasattr(_libc, "sync_file_range"):
            return
        self._waiting.add(fd)
        self._asked.put(fd)
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hsdump-write-back", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            fd = self._asked.get()
            self._waiting.discard(fd)  # before the call: what is written during it is asked for again
            _libc.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


_write_back = _WriteBack()
os.register_at_fork(after_in_child=_write_back.__init__)  # a child has no such thread


class Fs:
    """The local file system. Each method is one step that can fail or be the last one before a crash."""

    def make_folder(self, path: Path) -> None:
        """Create a folder and make its name durable; one that exists is fine."""
        if path.is_dir():
            return
        self.make_folder(path.parent)
        path.mkdir(exist_ok=True)
        self.sync_folder(path.parent)

    def create(self, path: Path) -> int:
        """Create a file that does not exist yet; gives its descriptor, to be closed by the caller."""
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, data: Any) -> None:
        """Append all bytes; the kernel takes at most 2 GiB at a time."""
        view = memoryview(data).cast("B")
        large = len(view) >= WRITE_BACK_BYTES
        while view:
            view = view[os.write(fd, view[: 1 << 30]) :]
        if large:
            _write_back.start(fd)

    def set_direct(self, fd: int, *, on: bool) -> bool:
        """Have a file's writes go past the page cache, or through it again.

        Returns:
            False where the file system says that it has no such writes; others say so at the first one (`EINVAL`).
        """
        try:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        except OSError:
            if not on:
                raise
            return False
        return True

    def write_at(self, fd: int, data: Any, offset: int) -> None:
        """Write bytes at a place: in what was written before, or at its end."""
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], offset + done)

    def sync(self, fd: int) -> None:
        """Make the file's bytes durable."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file its final name, replacing what may be there."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        """Delete a folder with all that is in it; dying in between leaves some of it."""
        shutil.rmtree(path)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable; without it a renamed file can vanish with the power."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def index_step(self, what: str) -> None:
        """Called before and after each transaction of the index, which does its own writing."""

    def write_file(self, path: Path, data: bytes) -> None:
        """Put a small file in place: complete and durable, or not there at all."""
        partial = path.with_name(path.name + ".partial")
        self.remove(partial)
        fd = self.create(partial)
        try:
            self.write(fd, data)
            self.sync(fd)
        finally:
            self.close(fd)
        self.rename(partial, path)
        self.sync_folder(path.parent)
