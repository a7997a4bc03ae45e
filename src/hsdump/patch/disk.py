"""Every operation by which hsdump changes an environment, in one place: tests put a failing disk or a kill here."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

PARTIAL = ".hsdump_partial"
"""Ending of a file that is being written; one that is found lying about was left by a crash."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp:
    """What a file is besides its bytes."""

    mode: int
    uid: int
    gid: int
    atime_ns: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        stat = path.stat()
        return cls(
            mode=stat.st_mode & 0o7777,
            uid=stat.st_uid,
            gid=stat.st_gid,
            atime_ns=stat.st_atime_ns,
            mtime_ns=stat.st_mtime_ns,
        )

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class Disk:
    """The local file system. Each method is one step that can fail or be the last one before a crash."""

    def write(self, path: Path, data: bytes, like: Path | None = None, stamp: Stamp | None = None) -> None:
        """Put a file in place: complete and durable, or not there at all.

        Args:
            like: a file whose extended attributes it gets.
            stamp: mode, owner and times that it gets.
        """
        partial = path.with_name(path.name + PARTIAL)
        partial.unlink(missing_ok=True)
        fd = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        except BaseException:
            os.close(fd)
            partial.unlink(missing_ok=True)  # a full disk must not be left fuller
            raise
        os.close(fd)
        if like is not None:
            shutil.copystat(like, partial)
        if stamp is not None:
            self._give(partial, stamp)
        self.replace(partial, path)

    def stamp(self, path: Path, stamp: Stamp) -> None:
        """Give a file its mode, owner and times."""
        self._give(path, stamp)

    def _give(self, path: Path, stamp: Stamp) -> None:
        have = path.stat()
        if (have.st_uid, have.st_gid) != (stamp.uid, stamp.gid):
            os.chown(path, stamp.uid, stamp.gid)
        path.chmod(stamp.mode)
        os.utime(path, ns=(stamp.atime_ns, stamp.mtime_ns))

    def replace(self, old: Path, new: Path) -> None:
        """Give a file another name, in place of what may have it, and make that durable."""
        old.replace(new)
        self.sync_folder(new.parent)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Remove a folder of hsdump's own with all that is in it."""
        shutil.rmtree(path, ignore_errors=True)

    def make_folder(self, path: Path) -> None:
        """Create a folder and make its name durable; one that exists is fine."""
        if not path.is_dir():
            self.make_folder(path.parent)
            with contextlib.suppress(FileExistsError):
                path.mkdir()
            self.sync_folder(path.parent)

    def sync_folder(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
