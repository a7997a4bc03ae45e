"""What state an environment is in: read from hashes and journals, not from what anybody remembers."""

from __future__ import annotations

from dataclasses import dataclass, field

from hsdump.locks import is_held
from hsdump.patch.blocks import marks
from hsdump.patch.journal import APPLIED, OPEN, FileRecord, Journal, is_busy, open_journal, read_journals
from hsdump.patch.restore import RUN_LOCK, find_orphans
from hsdump.patch.site import Site, origin, sha256

CLEAN, PATCHED, INTERRUPTED = "clean", "patched", "interrupted"
MODIFIED, DAMAGED, OVERWRITTEN, ORPHANED = "modified", "damaged", "overwritten", "orphaned backup"

EXIT_CODES = {CLEAN: 0, PATCHED: 1}
"""Of `hsdump patch status`; every other state is 2: somebody has to look."""

PLACES = ("layers/logits_processor.py", "model_executor/model_runner.py", "model_executor/forward_batch_info.py")
"""Files that are compared with the wheel's hashes where no journal names any."""


@dataclass(kw_only=True, slots=True)
class FileStatus:
    """One file."""

    path: str
    state: str
    """`original`, `patched`, `edited`, `gone`, or as `origin` says where no patch is."""

    backup: str
    """`sound`, `damaged`, `missing`, or empty where none is expected."""


@dataclass(kw_only=True, slots=True)
class Status:
    """One environment."""

    package: str
    python: str | None
    sglang_version: str
    editable: bool
    state: str
    what: str
    """One sentence."""

    next: str = ""
    """What to do, where something has to be done."""

    patch_id: str = ""
    hsdump_version: str = ""
    since: str = ""
    by: str = ""
    reason: str = ""
    target: str | None = None
    kept: list[str] = field(default_factory=list)
    """Restored patches whose backups are still there."""

    files: list[FileStatus] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES.get(self.state, 2)


def status(site: Site) -> Status:
    """Find out.

    Raises:
        PatchError: a journal cannot be read.
    """
    journal = open_journal(site)
    found = _of_journal(site, journal) if journal is not None else _without_journal(site)
    if is_busy(site):
        found.what += "; another hsdump is changing it at this moment"
    closed = [past for past in read_journals(site) if past.state not in OPEN]
    found.kept = [past.patch_id for past in closed if any(record.backup(site).is_file() for record in past.files)]
    if found.kept and found.state == CLEAN:
        found.what += f"; backups of {', '.join(found.kept)} are kept until `hsdump patch clean`"
    return found


def _new(site: Site, state: str, what: str, then: str = "") -> Status:
    return Status(
        package=str(site.package),
        python=site.python,
        sglang_version=site.version,
        editable=site.editable,
        state=state,
        what=what,
        next=then,
    )


def _of_journal(site: Site, journal: Journal) -> Status:
    files = [_file_status(site, record) for record in journal.files]
    states = {file.state for file in files}
    command = f"hsdump patch restore {site.how_to_name}"
    if journal.state != APPLIED and is_busy(site):
        found = _new(site, INTERRUPTED, f"{journal.state} now", "wait for it")
    elif journal.state != APPLIED:
        patched = sum(file.state == "patched" for file in files)
        what = f"{journal.state} was interrupted: {patched} of {len(files)} files hold the patch, each is whole"
        found = _new(site, INTERRUPTED, what, f"{command}, which completes or rolls back")
    elif states == {"patched"} and all(file.backup == "sound" for file in files):
        owner = ""
        if journal.owner:
            owner = ", by a living `hsdump run`" if is_held(site.state / RUN_LOCK) else ", by an `hsdump run` that died"
        found = _new(site, PATCHED, f"patched{owner}", command)
    elif "patched" not in states and all(site.hashes.get(r.path) == _hash(site, r) for r in journal.files):
        found = _new(site, OVERWRITTEN, "SGLang was installed again over the patch; its backups are of no use", command)
    elif "edited" in states or "gone" in states or "original" in states:
        what = "patched, and changed since: " + ", ".join(f"{f.path} {f.state}" for f in files if f.state != "patched")
        found = _new(site, MODIFIED, what, f"{command} shows the edits")
    else:
        what = "patched, but " + ", ".join(
            f"the backup of {f.path} is {f.backup}" for f in files if f.backup != "sound"
        )
        found = _new(site, DAMAGED, what, f"{command} --without-backup")
    found.patch_id, found.hsdump_version = journal.patch_id, journal.hsdump_version
    found.since, found.by, found.reason, found.target = journal.created, journal.by, journal.reason, journal.target
    found.files = files
    return found


def _hash(site: Site, record: FileRecord) -> str:
    path = record.file(site)
    return sha256(path.read_bytes()) if path.is_file() else ""


def _file_status(site: Site, record: FileRecord) -> FileStatus:
    digest, backup = _hash(site, record), record.backup(site)
    known = {record.before: "original", record.after: "patched", "": "gone"}
    sound = "missing"
    if backup.is_file():
        sound = "sound" if sha256(backup.read_bytes()) == record.before else "damaged"
    return FileStatus(path=record.path, state=known.get(digest, "edited"), backup=sound)


def _without_journal(site: Site) -> Status:
    paths = [path for place in PLACES if (path := site.package / "srt" / place).is_file()]
    origins = {path: origin(site, path) for path in paths}
    files = [FileStatus(path=site.relative(path), state=origins[path].state, backup="") for path in paths]
    marked = {path: ids for path in paths if (ids := marks(path.read_bytes()))}
    orphans = find_orphans(site)
    if marked:
        names = ", ".join(sorted({name for ids in marked.values() for name in ids}))
        what = f"hsdump's blocks ({names}) are in {len(marked)} files, and their journal is gone"
        found = _new(site, DAMAGED, what, f"install SGLang {site.version} again, or put the *.bak_hsdump files back")
    elif orphans:
        what = f"{site.relative(orphans[0])} and {len(orphans) - 1} more" if orphans[1:] else site.relative(orphans[0])
        found = _new(
            site, ORPHANED, f"no journal knows {what}", "compare it; `hsdump patch clean --orphans` removes it"
        )
    elif any(found.state == "modified" for found in origins.values()):
        edited = [site.relative(path) for path, found in origins.items() if found.state == "modified"]
        found = _new(site, MODIFIED, f"edited since it was installed, not by hsdump: {', '.join(edited)}")
    else:
        sure = all(found.state == "as installed" for found in origins.values())
        found = _new(site, CLEAN, "as installed" if sure else "no patch; nothing here says what was installed")
    found.files = files
    return found


def is_patched(site: Site) -> bool:
    """Tell whether a whole patch is in the files."""
    return status(site).state == PATCHED
