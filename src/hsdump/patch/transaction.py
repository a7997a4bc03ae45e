"""Applying a patch: all is checked first, each file changes by one rename, and a failure undoes every step."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from hsdump.errors import HsdumpError, PatchError
from hsdump.patch.anchors import Edit, find_edits
from hsdump.patch.blocks import fit, insert
from hsdump.patch.disk import Disk, Stamp
from hsdump.patch.importing import check_imports, copy_code
from hsdump.patch.journal import (
    APPLIED,
    APPLYING,
    BACKUP,
    FileRecord,
    Journal,
    locked,
    now,
    open_journal,
    read_journals,
    who,
)
from hsdump.patch.live import refuse_running
from hsdump.patch.recovery import keep_bytecode, recover, roll_back, sweep
from hsdump.patch.site import Site, origin, sha256, unified

ROOM_BYTES = 16 << 20
"""Free space that must be there beyond what is written: a full disk breaks more than hsdump."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ApplyOptions:
    """What `hsdump patch apply` was asked for."""

    target: str | None = None
    reason: str = ""
    accept_modified: bool = False
    import_check: bool = True
    owner: str = ""
    force: bool = False
    """Although a server seems to run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One file as it is and as it would be."""

    edit: Edit
    patched: bytes
    record: FileRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A patch that has not been applied."""

    site: Site
    patch_id: str
    code: Path
    changes: tuple[Change, ...]

    @property
    def diff(self) -> str:
        return "".join(
            unified(change.edit.original, change.patched, change.record.path, f"{change.record.path} (patched)")
            for change in self.changes
        )

    @property
    def expected(self) -> list[str]:
        """The classes that the blocks hand over."""
        return [block.name for change in self.changes for block in change.edit.blocks if block.kind in _CLASSES]


_CLASSES = ("logits", "runner", "batch", "model")


def make_plan(site: Site, target: str | None = None) -> Plan:
    """Find the places and build the patched texts; nothing is written.

    Raises:
        PatchError: a place is missing or ambiguous, or the result does not compile.
    """
    patch_id = secrets.token_hex(4)
    code = site.state / f"{patch_id}-code"
    changes = []
    for edit in find_edits(site, target):
        texts = fit(edit.original, [(block.after_line, block.text(patch_id, code)) for block in edit.blocks])
        patched = insert(edit.original, texts)
        try:
            compile(patched, str(edit.path), "exec", dont_inherit=True)
        except SyntaxError as error:
            raise PatchError(f"{edit.path} would not compile ({error})", "nothing was changed; report this") from error
        record = FileRecord(
            path=site.relative(edit.path),
            before=sha256(edit.original),
            after=sha256(patched),
            stamp=Stamp.of(edit.path).as_dict(),
            texts=texts,
            anchors=[block.anchor for block in edit.blocks],
            origin=origin(site, edit.path).state,
        )
        changes.append(Change(edit=edit, patched=patched, record=record))
    return Plan(site=site, patch_id=patch_id, code=code, changes=tuple(changes))


def apply(site: Site, options: ApplyOptions, disk: Disk | None = None) -> Journal:
    """Put the patch into the environment, or leave it as it is and say why.

    An unfinished apply or restore of an earlier process is brought to an end first.

    Raises:
        PatchError: whatever forbids it, with what to do.
    """
    disk = disk or Disk()
    with locked(site, disk):
        recover(site, disk)
        sweep(site, disk)
        plan = _checked_plan(site, options)
        try:
            copy_code(plan.code, disk)
            notes = _prove(plan, options)
            journal = _journal(plan, options, notes)
        except OSError as error:
            disk.remove_folder(plan.code)
            raise _disk_error(site, error) from error
        except BaseException:
            disk.remove_folder(plan.code)
            raise
        _carry_out(plan, journal, options, disk)
    return journal


def _checked_plan(site: Site, options: ApplyOptions) -> Plan:
    current = open_journal(site)
    if current is not None:
        raise PatchError(
            f"{site.package} carries hsdump's patch {current.patch_id} already (by {current.by}, {current.created})",
            f"use it, or take it out: hsdump patch restore {site.how_to_name}",
        )
    if not options.force:
        refuse_running(site, "--force")
    plan = make_plan(site, options.target)
    for change in plan.changes:
        _refuse_edited(site, change, options)
        _refuse_unwritable(change.edit.path)
    _refuse_short_disk(site, plan)
    return plan


def _refuse_edited(site: Site, change: Change, options: ApplyOptions) -> None:
    backup = change.record.backup(site)
    if backup.is_symlink() or (backup.exists() and sha256(backup.read_bytes()) != change.record.before):
        known = any(backup == record.backup(site) for journal in read_journals(site) for record in journal.files)
        raise PatchError(
            f"{backup} is there, and holds something else than {change.edit.path.name} does now",
            "it is of an earlier patch that was restored: hsdump patch clean"
            if known
            else "no journal knows it, so somebody patched by hand: put it back or remove it",
        )
    found = origin(site, change.edit.path)
    if found.state != "as installed" and not options.accept_modified:
        what = "has been edited since it was installed" if found.state == "modified" else "may have been edited"
        raise PatchError(
            f"{change.edit.path} {what}: {found.detail}",
            "look at it; --accept-modified patches it as it is, and restore gives exactly that back",
        )


def _refuse_unwritable(path: Path) -> None:
    if path.is_symlink():
        raise PatchError(
            f"{path} is a symbolic link to {path.resolve()}: other environments may share that file",
            "install SGLang there as copies (uv: --link-mode copy), then patch",
        )
    stat = path.stat()
    if not stat.st_mode & 0o222 or not os.access(path, os.W_OK) or not os.access(path.parent, os.W_OK | os.X_OK):
        raise PatchError(
            f"{path} is not writable (mode {stat.st_mode & 0o7777:04o}, owner {stat.st_uid}, we are {os.geteuid()})",
            f"run this as its owner, or make it writable: chmod u+w '{path}'",
        )
    if os.geteuid() not in (0, stat.st_uid):
        raise PatchError(
            f"{path} belongs to user {stat.st_uid}, and restore could not give it back to them",
            "run this as that user",
        )


def _refuse_short_disk(site: Site, plan: Plan) -> None:
    stat = os.statvfs(site.root)
    free = stat.f_bavail * stat.f_frsize
    needed = ROOM_BYTES + sum(len(change.edit.original) + 2 * len(change.patched) for change in plan.changes)
    if free < needed:
        raise PatchError(
            f"{free} bytes are free under {site.root}, {needed} are needed for backups and a margin", "free some space"
        )


def _prove(plan: Plan, options: ApplyOptions) -> list[str]:
    if not options.import_check:
        return ["import check left out (--no-import-check)"]
    texts = {change.edit.path: change.patched for change in plan.changes}
    return [check_imports(plan.site, texts, plan.expected)]


def _journal(plan: Plan, options: ApplyOptions, notes: list[str]) -> Journal:
    journal = Journal(
        patch_id=plan.patch_id,
        state=APPLYING,
        package=str(plan.site.package),
        sglang_version=plan.site.version,
        python=plan.site.python,
        target=options.target,
        reason=options.reason,
        owner=options.owner,
        code=str(plan.code),
        diff=plan.diff,
        files=[change.record for change in plan.changes],
        by=who(),
        created=now(),
    )
    for note in ("checked: anchors found once each, result compiles", *notes):
        journal.note(note)
    return journal


def _carry_out(plan: Plan, journal: Journal, options: ApplyOptions, disk: Disk) -> None:
    """Write; from the first line of the journal on, a failure is rolled back here, and a crash by the next command."""
    site = plan.site
    try:
        journal.write(site, disk)
        for change in plan.changes:
            _backup(site, change, disk)
        journal.note(f"backups written as *{BACKUP}")
        journal.write(site, disk)
        if not options.force:
            refuse_running(site, "--force")  # again: the import took its time
        for change in plan.changes:
            _swap(change, disk)
            keep_bytecode(site, journal, change.record, disk)
        journal.note("files patched, compiled files of the originals put aside")
        for change in plan.changes:
            if sha256(change.edit.path.read_bytes()) != change.record.after:
                raise PatchError(f"{change.edit.path} does not hold what was written", "see the disk's health")
        journal.state = APPLIED
        journal.note("applied")
        journal.write(site, disk)
    except (OSError, HsdumpError, KeyboardInterrupt) as error:
        roll_back(site, journal, disk)
        disk.remove(journal.path(site))
        sweep(site, disk)
        if isinstance(error, OSError):
            raise _disk_error(site, error) from error
        raise


def _backup(site: Site, change: Change, disk: Disk) -> None:
    backup = change.record.backup(site)
    if sha256(change.edit.path.read_bytes()) != change.record.before:
        raise PatchError(f"{change.edit.path} changed while it was being patched", "see who edits it, then try again")
    disk.write(backup, change.edit.original, like=change.edit.path, stamp=change.record.original_stamp())
    if sha256(backup.read_bytes()) != change.record.before:
        raise PatchError(f"{backup} does not hold what was written", "see the disk's health")


def _swap(change: Change, disk: Disk) -> None:
    """Put the patched text in place. Its own time: compiled files of the original no longer fit."""
    path = change.edit.path
    stamp = change.record.original_stamp()
    times = {"atime_ns": _now_ns(path), "mtime_ns": _now_ns(path)}
    fresh = Stamp(mode=stamp.mode, uid=stamp.uid, gid=stamp.gid, **times)
    disk.write(path, change.patched, like=path, stamp=fresh)


def _now_ns(path: Path) -> int:
    """Give a time that is another second than the original's, which is all that compiled files compare."""
    current = time.time_ns()
    old = path.stat().st_mtime_ns
    return current if current // 10**9 != old // 10**9 else current + 10**9


def _disk_error(site: Site, error: OSError) -> PatchError:
    return PatchError(
        f"{site.root} could not be written: {error}; everything is as it was",
        "free some space or see the disk's health, then try again",
    )
