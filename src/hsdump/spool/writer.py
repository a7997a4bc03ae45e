"""The server's side of the spool: entries that grow row by row and appear only when complete.

Nothing here waits: a full spool, a full file system or a vanished folder turns into a `failed` note for the request
concerned, so that the server goes on serving.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from hsdump.schema import StateShape
from hsdump.spool.entry import EntryLayout, encode_header
from hsdump.spool.names import Rid, SpoolPaths


class Refused(Exception):
    """This request gets no entry: a reason word and a sentence, for its `failed` note."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(slots=True)
class OpenEntry:
    """One request whose rows are coming in."""

    rid: Rid
    fd: int
    layout: EntryLayout
    next_row: int = 0
    """Rows 0..next_row-1 are in."""

    touched_s: float = 0.0
    """Monotonic time of the last rows."""


class SpoolWriter:
    """Writes entries into one spool within a quota. One instance a capturing process, used by one thread."""

    def __init__(self, root: Path, shape: StateShape, *, max_bytes: int, keep_free_bytes: int = 256 << 20) -> None:
        """Args:
        max_bytes: entries of all states together never take more than this.
        keep_free_bytes: left free on the file system whatever `max_bytes` says; other programs live there too.
        """
        self.paths = SpoolPaths(root)
        self.shape = shape
        self.max_bytes = max_bytes
        self.keep_free_bytes = keep_free_bytes

    def begin(self, rid: Rid) -> OpenEntry:
        """Reserve the whole entry, so that later rows cannot run out of memory halfway.

        Raises:
            Refused: beyond the quota, or the file system is nearly full.
        """
        head, layout = encode_header(str(rid), self.shape, rid.num_tokens)
        self._check_room(layout.total_bytes)
        path = self.paths.partial / str(rid)
        fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, layout.total_bytes)
            os.pwrite(fd, head, 0)
        except OSError as error:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise Refused("spool-full", f"{layout.total_bytes} bytes for one entry: {error}") from error
        return OpenEntry(rid, fd, layout, touched_s=time.monotonic())

    def write(self, entry: OpenEntry, offset: int, data: memoryview) -> None:
        """Put bytes at their place in the entry.

        Raises:
            Refused: the file system took less than all of it.
        """
        while data:
            written = os.pwrite(entry.fd, data, offset)
            if written <= 0:
                raise Refused("spool-full", f"wrote {written} of {len(data)} bytes")
            offset, data = offset + written, data[written:]

    def publish(self, entry: OpenEntry) -> bool:
        """Make a complete entry visible. False when the client swept it away meanwhile."""
        os.close(entry.fd)
        name = str(entry.rid)
        try:
            os.rename(self.paths.partial / name, self.paths.ready / name)  # noqa: PTH104 - both sides are ours
        except FileNotFoundError:
            return False
        return True

    def abandon(self, entry: OpenEntry) -> None:
        """Drop an entry that will never be complete."""
        os.close(entry.fd)
        (self.paths.partial / str(entry.rid)).unlink(missing_ok=True)

    def fail(self, rid: Rid, reason: str, detail: str) -> None:
        """Tell the client why it will not get this entry. Best effort: with no room even for that, it times out."""
        note = json.dumps({"rid": str(rid), "reason": reason, "detail": detail}).encode()
        partial = self.paths.failed / f".{rid}"
        try:
            partial.write_bytes(note)
            partial.rename(self.paths.failed / str(rid))
        except OSError:
            return

    def used_bytes(self) -> int:
        """Bytes that entries take now, finished ones that no client has taken yet included."""
        total = 0
        for folder in (self.paths.partial, self.paths.ready):
            for entry in os.scandir(folder):
                with contextlib.suppress(FileNotFoundError):  # a client took it at this moment
                    total += entry.stat().st_size
        return total

    def _check_room(self, num_bytes: int) -> None:
        try:
            used = self.used_bytes()
            stat = os.statvfs(self.paths.root)
        except OSError as error:
            raise Refused("spool-gone", f"the spool folder cannot be read: {error}") from error
        if used + num_bytes > self.max_bytes:
            raise Refused("spool-full", f"{used} of {self.max_bytes} bytes in use, {num_bytes} more asked for")
        free = stat.f_bavail * stat.f_frsize
        if free - num_bytes < self.keep_free_bytes:
            raise Refused(
                "shared-memory-full", f"{free} bytes free, {self.keep_free_bytes} must stay, {num_bytes} asked for"
            )
