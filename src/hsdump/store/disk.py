"""Every disk operation of the store goes through here: one place for durability, and the seam where tests break it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hsdump.errors import StoreError


class Disk:
    """The real file system. Tests pass one that fails or dies at the n-th operation."""

    def create(self, path: Path) -> int:
        """Open a new file for writing; it must not exist."""
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, data: Any, offset: int) -> None:
        """Write all of a buffer at an offset."""
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(fd, view, offset)
            offset, view = offset + written, view[written:]

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Move within one file system, replacing `new`; durable once the folder is synced."""
        old.rename(new)

    def sync_folder(self, folder: Path) -> None:
        """Make names in a folder durable: without it a power loss can take them back."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)


def write_file(disk: Disk, path: Path, data: bytes) -> None:
    """Make a small file appear complete, or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    disk.unlink(partial)
    fd = disk.create(partial)
    try:
        disk.write(fd, data, 0)
        disk.sync(fd)
    finally:
        disk.close(fd)
    disk.rename(partial, path)
    disk.sync_folder(path.parent)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system says about the store's folder into an error that says what to do."""
    try:
        yield
    except OSError as error:
        fix = {
            errno.ENOSPC: "free space there, then run the same command again: everything committed is safe",
            errno.EDQUOT: "raise the quota, then run the same command again: everything committed is safe",
            errno.EROFS: "name a writable folder with --out, or mount it read-write",
            errno.EACCES: "name a writable folder with --out, or change its rights",
            errno.EPERM: "name a writable folder with --out, or change its rights",
        }.get(error.errno or 0, "check the disk (dmesg), then run the same command again")
        raise StoreError(f"the store {path} cannot be written: {error}", fix) from error
