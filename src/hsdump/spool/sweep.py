"""Leftovers: entries of clients that died, spools of servers that died. What has a living owner is never touched."""

from __future__ import annotations

import contextlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from hsdump.locks import AliveLock, is_held, left_behind
from hsdump.spool.names import PREFIX, SHARED_MEMORY, Rid, SpoolPaths, is_run


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep removed."""

    files: int = 0
    num_bytes: int = 0
    spools: tuple[str, ...] = ()

    def __add__(self, other: Swept) -> Swept:
        return Swept(self.files + other.files, self.num_bytes + other.num_bytes, self.spools + other.spools)


def sweep_dead_clients(root: Path) -> Swept:
    """Remove what dead client runs left in a living spool."""
    paths = SpoolPaths(root)
    files = num_bytes = 0
    for folder in paths.entries():
        for path in list(folder.glob(f"*{PREFIX}*")):
            rid = Rid.parse(path.name.lstrip("."))
            if rid is None or is_held(paths.client_lock(rid.run)):
                continue
            size = _size(path)
            path.unlink(missing_ok=True)
            files, num_bytes = files + 1, num_bytes + size
    for lock in list(paths.clients.glob("*.lock")):
        if is_run(lock.stem):
            with left_behind(lock) as dead:
                if dead:
                    lock.unlink(missing_ok=True)
    return Swept(files, num_bytes)


def is_abandoned(root: Path, *, besides: Path | None = None) -> bool:
    """Tell whether a spool has no living server, launcher or client, `besides` the owner of one lock."""
    paths = SpoolPaths(root)
    locks = [*root.glob("*.lock"), *paths.clients.glob("*.lock")]
    return paths.partial.is_dir() and not any(is_held(lock) for lock in locks if lock != besides)


def sweep_dead_spools(shared_memory: Path = SHARED_MEMORY) -> Swept:
    """Remove the spools of servers that are gone, kill -9 included."""
    total = Swept()
    for root in sorted(shared_memory.glob(f"{PREFIX}*")):
        if root.is_dir() and not root.is_symlink() and is_abandoned(root):
            total += _remove_abandoned(root)
    return total


def _remove_abandoned(root: Path) -> Swept:
    """Remove a spool as its launcher, so that a server that starts there at this moment waits or is left alone."""
    try:
        lock = AliveLock(SpoolPaths(root).launcher_lock)
    except OSError:  # somebody starts there, or removes it, now
        return Swept()
    try:
        if not is_abandoned(root, besides=lock.path):
            return Swept()
        sizes = [_size(path) for path in root.rglob("*") if path.is_file() and path != lock.path]
        remove_spool(root, keep=lock.path)
    finally:
        lock.release()
    with contextlib.suppress(OSError):
        root.rmdir()
    return Swept(len(sizes), sum(sizes), (str(root),))


_OURS = re.compile(r"partial|ready|failed|clients|(server|ring)-\d+(\.\w+)?|(launcher|ring-reader)\.lock")


def list_strangers(root: Path) -> list[str]:
    """Name what lies in a folder and is not a spool's."""
    return sorted(path.name for path in root.iterdir() if not _OURS.fullmatch(path.name))


def remove_spool(root: Path, *, keep: Path | None = None) -> None:
    """Remove a spool's own files, and its folder when nothing else is in it; never what somebody else put there."""
    for path in list(root.iterdir()) if root.is_dir() else []:
        if path == keep or not _OURS.fullmatch(path.name) or path.is_symlink():
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if keep is None:
        with contextlib.suppress(OSError):
            root.rmdir()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
