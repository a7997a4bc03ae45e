"""The client's side of the spool: wait for an entry, map it, check it, take it away."""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from hsdump.errors import SpoolError
from hsdump.locks import AliveLock
from hsdump.spool.entry import MAX_HEADER_BYTES, EntryLayout, decode_header
from hsdump.spool.names import Rid, SpoolPaths


@dataclass(slots=True)
class ReadyEntry:
    """A complete entry, mapped into memory."""

    layout: EntryLayout
    buffer: memoryview
    _map: mmap.mmap
    _path: Path

    def token_ids(self) -> memoryview:
        """The tokens as the model saw them, int64 [S]."""
        start = self.layout.payload_offset
        return self.buffer[start : start + self.layout.token_ids_bytes]

    def state(self, index: int) -> memoryview:
        """Bits of state `index`, [S, H] row by row."""
        start = self.layout.state_offset(index)
        return self.buffer[start : start + self.layout.state_bytes]

    def release(self) -> None:
        """Take the entry out of the spool. Its memory goes back once no array refers to it any more."""
        self._path.unlink(missing_ok=True)
        self.buffer.release()
        try:
            self._map.close()
        except BufferError:  # arrays still look at it; the last of them frees it
            return


@dataclass(frozen=True, slots=True)
class FailedNote:
    """The server's reason for giving no entry."""

    reason: str
    detail: str


class SpoolReader:
    """One client run's view of a spool. While it is open, its lock says that its entries have an owner."""

    def __init__(self, root: Path, run: str) -> None:
        """Raises:
        SpoolError: the folder is not there, or not ours to write in.
        """
        self.paths = SpoolPaths(root)
        self.run = run
        try:
            self._lock = AliveLock(self.paths.client_lock(run))
        except OSError as error:
            raise SpoolError(
                f"the server's spool {root} cannot be used from here ({error})",
                "run the client on the server's host as the same user; in containers share /dev/shm "
                "(docker: --ipc=host, Kubernetes: one emptyDir with medium Memory) or name it with --spool",
            ) from error

    def take(self, rid: Rid) -> ReadyEntry | FailedNote | None:
        """Give this request's outcome, or None while there is none.

        Raises:
            SpoolError: the entry's bytes are not what its header says.
        """
        path = self.paths.ready / str(rid)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return self._take_failure(rid)
        try:
            mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        try:
            found, layout = decode_header(mapped[:MAX_HEADER_BYTES])
            if found != str(rid) or layout.num_tokens != rid.num_tokens or layout.total_bytes != len(mapped):
                raise ValueError(f"it holds {layout.num_tokens} rows of {found} in {len(mapped)} bytes")
        except (ValueError, KeyError, TypeError) as error:
            mapped.close()
            path.unlink(missing_ok=True)
            raise SpoolError(f"the spool entry {rid} is damaged: {error}", "run extract again") from error
        return ReadyEntry(layout, memoryview(mapped), mapped, path)

    def rows_so_far(self, rid: Rid) -> bool:
        """Tell whether the server has begun this entry."""
        return (self.paths.partial / str(rid)).exists()

    def forget(self, rid: Rid) -> None:
        """Remove whatever the spool holds of a request that nobody waits for any more."""
        for folder in self.paths.entries():
            (folder / str(rid)).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove this run's leftovers and give the lock back."""
        for folder in self.paths.entries():
            for path in folder.glob(f"hsdump-{self.run}-*"):
                path.unlink(missing_ok=True)
        self._lock.release()

    def _take_failure(self, rid: Rid) -> FailedNote | None:
        path = self.paths.failed / str(rid)
        try:
            note = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            note = {}
        path.unlink(missing_ok=True)
        return FailedNote(str(note.get("reason", "unknown")), str(note.get("detail", "")))
