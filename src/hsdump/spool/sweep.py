"""Leftovers: entries of clients that died, spools of servers that died. What is owned when it is looked at stays."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from hsdump.locks import AliveLock, is_held, left_behind
from hsdump.spool.names import PREFIX, SHARED_MEMORY, Rid, SpoolPaths, is_run

DEAD = ".dead"
"""Ends the name of a spool that is being removed."""


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
    is_spool = paths.partial.is_dir() or root.name.endswith(DEAD)
    return is_spool and not any(is_held(lock) for lock in locks if lock != besides)


def sweep_dead_spools(shared_memory: Path = SHARED_MEMORY) -> Swept:
    """Remove the spools of servers that are gone, kill -9 included."""
    total = Swept()
    for root in sorted(shared_memory.glob(f"{PREFIX}*")):
        # Another user's folder cannot be looked into, and another sweep may be just removing this one.
        with contextlib.suppress(OSError):
            if root.is_dir() and not root.is_symlink() and is_abandoned(root):
                total += _remove_abandoned(root)
    return total


def _remove_abandoned(root: Path) -> Swept:
    """Remove a spool under its launcher's lock, out of the way of a server that starts there at this moment."""
    try:
        lock = AliveLock(SpoolPaths(root).launcher_lock)
    except OSError:  # somebody starts there, or removes it, now
        return Swept()
    with contextlib.ExitStack() as stack:
        stack.callback(lock.release)
        if not is_abandoned(root, besides=lock.path):
            return Swept()
        place = root
        if not root.name.endswith(DEAD) and not list_strangers(root):
            # Gigabytes take a while to remove; a new server has its folder at once.
            place = root.rename(root.with_name(f"{root.name}-{os.getpid()}{DEAD}"))
            lock.path = SpoolPaths(place).launcher_lock
            if not is_abandoned(place, besides=lock.path):  # a server moved in between the look and the renaming
                place = place.rename(root)
                lock.path = SpoolPaths(place).launcher_lock
                return Swept()
        sizes = [_size(path) for path in place.rglob("*") if path.is_file() and path != lock.path]
        remove_held(lock)
    return Swept(len(sizes), sum(sizes), (str(root),))


_OURS = re.compile(r"partial|ready|failed|clients|(server|ring)-\d+(\.\w+)?|(launcher|ring-reader)\.lock")


def list_strangers(root: Path) -> list[str]:
    """Name what lies in a folder and is not a spool's."""
    return sorted(path.name for path in root.iterdir() if not _OURS.fullmatch(path.name))


def clear_spool(lock: AliveLock) -> None:
    """Remove a spool's own files but its launcher's lock, which is held; never what somebody else put there."""
    partial = SpoolPaths(lock.path.parent).partial
    # By `partial` a sweep knows a spool, so it is the last to go.
    for path in sorted(lock.path.parent.iterdir(), key=lambda path: path == partial):
        if path == lock.path or not _OURS.fullmatch(path.name) or path.is_symlink():
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remove_held(lock: AliveLock) -> None:
    """Remove the spool whose launcher's lock this is, and its folder when nothing else is in it.

    The lock goes last: whoever waits for it must not lose what it makes then. A folder that somebody removed meanwhile
    (logind does at a user's last logout: RemoveIPC) is nothing to complain about.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            clear_spool(lock)
    finally:
        lock.release()
        with contextlib.suppress(OSError):
            lock.path.parent.rmdir()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
