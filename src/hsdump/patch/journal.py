"""What was done to an environment, written down before it is done: one JSON file a patch, rewritten at each step."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from hsdump._version import __version__
from hsdump.errors import PatchError
from hsdump.locks import take
from hsdump.patch.disk import Disk, Stamp
from hsdump.patch.site import Site

BACKUP = ".bak_hsdump"

APPLYING, APPLIED, RESTORING = "applying", "applied", "restoring"
RESTORED, ROLLED_BACK, OVERWRITTEN = "restored", "rolled back", "overwritten"
OPEN = (APPLYING, APPLIED, RESTORING)
"""States of a patch that is in the files, or may be."""


@dataclass(kw_only=True, slots=True)
class FileRecord:
    """One file of a patch. All hashes are sha256 in hex."""

    path: str
    """Relative to the folder that holds the package."""

    before: str
    after: str
    stamp: dict[str, int]
    """Mode, owner and times of the original."""

    texts: list[tuple[int, str]]
    """The blocks, each with the line that it follows."""

    anchors: list[str]
    origin: str
    """Whether the original was what the wheel had installed."""

    bytecode: list[str] = field(default_factory=list)
    """Names of compiled files of the original, kept beside the journal."""

    kept_edits: str = ""
    """sha256 of what a restore left when it kept edits."""

    def file(self, site: Site) -> Path:
        return site.root / self.path

    def backup(self, site: Site) -> Path:
        return site.root / (self.path + BACKUP)

    def original_stamp(self) -> Stamp:
        return Stamp(**self.stamp)


@dataclass(kw_only=True, slots=True)
class Journal:
    """One patch of one environment."""

    patch_id: str
    state: str
    package: str
    sglang_version: str
    python: str | None
    target: str | None
    reason: str
    code: str
    """Folder of hsdump's own code, which the blocks import."""

    diff: str
    owner: str = ""
    """Lock of the `hsdump run` that applied it, empty for a patch that stays until somebody restores it."""

    files: list[FileRecord] = field(default_factory=list)
    events: list[dict[str, str]] = field(default_factory=list)
    hsdump_version: str = __version__
    by: str = ""
    created: str = ""
    format: int = 1

    def note(self, what: str) -> None:
        """Add a line to the history: when, by whom, what."""
        self.events.append({"at": now(), "by": who(), "what": what})

    def path(self, site: Site) -> Path:
        return site.state / f"{self.patch_id}.json"

    def keep(self, site: Site) -> Path:
        """The folder for compiled files of the originals."""
        return site.state / f"{self.patch_id}-bytecode"

    def write(self, site: Site, disk: Disk) -> None:
        """Make the journal durable as it is now."""
        disk.write(self.path(site), json.dumps(asdict(self), indent=1).encode() + b"\n")


def read_journals(site: Site) -> list[Journal]:
    """Read all patches of an environment, oldest first.

    Raises:
        PatchError: one cannot be read.
    """
    found = []
    for path in site.state.glob("????????.json") if site.state.is_dir() else []:
        try:
            raw = json.loads(path.read_bytes())
            files = [FileRecord(**{**file, "texts": [tuple(text) for text in file["texts"]]}) for file in raw["files"]]
            found.append(Journal(**{**raw, "files": files}))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise PatchError(
                f"the journal {path} cannot be read ({type(error).__name__}: {error})",
                f"compare the files with their {BACKUP} copies by hand, or install SGLang again, then remove it",
            ) from error
    return sorted(found, key=lambda journal: journal.created)


def open_journal(site: Site) -> Journal | None:
    """Give the patch that is in the files, or may be."""
    found = [journal for journal in read_journals(site) if journal.state in OPEN]
    if len(found) > 1:
        raise PatchError(
            f"{site.state} holds {len(found)} open patches ({', '.join(journal.patch_id for journal in found)})",
            "install SGLang again there, then remove that folder",
        )
    return found[0] if found else None


@contextmanager
def locked(site: Site, disk: Disk) -> Iterator[None]:
    """Hold the environment: one change at a time, and an empty state folder goes again.

    The lock is on the package's folder itself, so that it leaves nothing behind and cannot be removed under somebody.

    Raises:
        PatchError: another hsdump changes it now, or the folder cannot be made.
    """
    fd = os.open(site.package, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if not take(fd):
        os.close(fd)
        raise PatchError(
            f"another hsdump is changing {site.package} now", "wait for it, then see `hsdump patch status`"
        )
    try:
        disk.make_folder(site.state)
        yield
    except OSError as error:
        raise PatchError(
            f"{site.root} cannot be written ({error})",
            f"run this as the user who owns {site.root}; an image's read-only layer has to be copied first",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            site.state.rmdir()
        os.close(fd)


def is_busy(site: Site) -> bool:
    """Tell whether an hsdump is changing the environment at this moment."""
    fd = os.open(site.package, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def who() -> str:
    """Name the user and the machine, for people who read the journal."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
