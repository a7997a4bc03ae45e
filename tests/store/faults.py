"""A disk that fails, tears writes or loses power at its n-th operation.

After a power loss only what was made durable is certain: bytes that were not synced may be there in part, names that
were not synced may be the old ones. `lose_power` chooses among these outcomes with a seed.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path
from typing import Any

from hsdump.extract.keeper import NOTE_THREAD
from hsdump.store.fs import Fs
from hsdump.store.side_by_side import COMMIT_THREAD, FILL_THREAD


class Crash(BaseException):
    """The machine is gone. Not an `Exception`: nothing in the store may catch it and go on."""


class FaultyFs(Fs):
    """Counts operations; at number `fuse` the disk dies (`crash`) or answers with an error once (`error`)."""

    def __init__(self, fuse: int | None = None, *, kind: str = "crash", seed: int = 0) -> None:
        self.fuse, self.kind, self.random = fuse, kind, random.Random(seed)
        self.operations = 0
        self.dead = False
        self.direct = False
        """For the test: whether its writer shall go past the page cache."""

        self._direct_files: set[int] = set()
        self.worst = False
        """All that was not made durable is lost, instead of some of it."""

        self.gate = threading.Event()
        """While it is clear, a commit in the second thread waits before its first operation, so that what the first
        thread does meanwhile comes in one order only."""

        self.gate.set()
        self.fill_gate = threading.Event()
        """The same for threads that fill shards side by side."""

        self.fill_gate.set()
        self.note_gate = threading.Event()
        """The same for the thread of a run that notes where samples are."""

        self.note_gate.set()
        self._lock = threading.Lock()
        self._paths: dict[int, Path] = {}
        self._synced_bytes: dict[Path, int] = {}
        """Files with bytes that were not made durable, and how many were."""

        self._renames: list[tuple[Path, Path]] = []
        """Not yet durable, oldest first."""

    @property
    def open_files(self) -> list[Path]:
        return list(self._paths.values())

    def create(self, path: Path) -> int:
        self._step()
        fd = super().create(path)
        self._paths[fd] = path
        self._synced_bytes[path] = 0
        return fd

    def write(self, fd: int, data: Any) -> None:
        view = memoryview(data).cast("B")
        self._step(lambda: Fs.write(self, fd, view[: self.random.randint(0, len(view))]))
        super().write(fd, view)

    def set_direct(self, fd: int, *, on: bool) -> bool:
        done = super().set_direct(fd, on=on)
        (self._direct_files.add if on and done else self._direct_files.discard)(fd)
        return done

    def write_at(self, fd: int, data: Any, offset: int) -> None:
        # Bytes inside a synced file that are overwritten in place would need more than a length to be modelled.
        assert self._synced_bytes[self._paths[fd]] == 0
        unit = 4096 if fd in self._direct_files else 1
        torn = self.random.randint(0, len(data)) // unit * unit
        self._step(lambda: Fs.write_at(self, fd, data[:torn], offset))
        super().write_at(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._step()
        super().sync(fd)
        self._synced_bytes.pop(self._paths[fd], None)

    def close(self, fd: int) -> None:
        self._direct_files.discard(fd)
        self._paths.pop(fd, None)  # first: another thread may get the same number at once
        super().close(fd)  # the descriptor goes with the process, too
        self._step()

    def rename(self, old: Path, new: Path) -> None:
        self._step()
        super().rename(old, new)
        if old in self._synced_bytes:
            self._synced_bytes[new] = self._synced_bytes.pop(old)
        self._renames.append((old, new))

    def remove(self, path: Path) -> None:
        self._step()
        super().remove(path)
        self._synced_bytes.pop(path, None)

    def remove_tree(self, path: Path) -> None:
        self._step(lambda: next(path.rglob("*.safetensors")).unlink())
        super().remove_tree(path)

    def sync_folder(self, path: Path) -> None:
        self._step()
        super().sync_folder(path)
        self._renames = [(old, new) for old, new in self._renames if new.parent != path]

    def index_step(self, what: str) -> None:
        self._step()

    def _step(self, tear: Any = None) -> None:
        gates = {COMMIT_THREAD: self.gate, FILL_THREAD: self.fill_gate, NOTE_THREAD: self.note_gate}
        for name, gate in gates.items():
            if threading.current_thread().name.startswith(name):
                assert gate.wait(60), f"nobody let {name} go on"
        with self._lock:  # of several threads one meets the fuse
            if self.dead:
                raise Crash
            self.operations += 1
            blown = self.operations == self.fuse
            self.dead = blown and self.kind == "crash"
        if not blown:
            return
        if tear is not None:
            tear()
        if self.kind == "crash":
            raise Crash
        raise OSError(self.random.choice([errno.EIO, errno.ENOSPC]), "the test's disk")

    def lose_power(self) -> None:
        """Leave on the real disk one of the states that a power loss may leave."""
        for old, new in reversed(self._renames):
            if (self.worst or self.random.random() < 0.5) and new.exists() and not old.exists():
                new.rename(old)
                if new in self._synced_bytes:
                    self._synced_bytes[old] = self._synced_bytes.pop(new)
        for path, durable in self._synced_bytes.items():
            if path.exists():
                os.truncate(path, durable if self.worst else self.random.randint(durable, path.stat().st_size))
