"""Bringing an interrupted apply or restore to an end, from whatever step a crash left it at.

An interrupted apply is rolled back, an interrupted restore is completed: either way the originals are in place.
"""

from __future__ import annotations

from pathlib import Path

from hsdump.errors import PatchError
from hsdump.patch.blocks import marks, take_out
from hsdump.patch.disk import PARTIAL, Disk
from hsdump.patch.journal import (
    APPLIED,
    APPLYING,
    RESTORED,
    ROLLED_BACK,
    FileRecord,
    Journal,
    open_journal,
    read_journals,
)
from hsdump.patch.site import Site, sha256


def recover(site: Site, disk: Disk) -> Journal | None:
    """Finish what an earlier process began, if anything.

    Returns:
        The journal of what was finished, or None.

    Raises:
        PatchError: a file was changed by somebody else meanwhile.
    """
    journal = open_journal(site)
    if journal is None or journal.state == APPLIED:
        return None
    if journal.state == APPLYING:
        roll_back(site, journal, disk)
        journal.state = ROLLED_BACK
        journal.note("an apply that did not finish was rolled back: the originals are in place")
    else:
        put_back(site, journal, disk)
        journal.state = RESTORED
        journal.note("a restore that did not finish was completed: the originals are in place")
    journal.write(site, disk)
    sweep(site, disk)
    return journal


def roll_back(site: Site, journal: Journal, disk: Disk) -> None:
    """Undo an apply: the backups become the files again, which a full disk does not hinder."""
    for record in journal.files:
        backup = record.backup(site)
        if backup.is_file() and sha256(backup.read_bytes()) == record.before and wanted_bytes(site, record) is not None:
            disk.replace(backup, record.file(site))
    put_back(site, journal, disk)
    for record in journal.files:
        disk.remove(record.backup(site))


def put_back(site: Site, journal: Journal, disk: Disk) -> None:
    """Put the originals in place, with their mode, owner, times and compiled files; each step may be a repetition.

    Raises:
        PatchError: a file is neither as before, nor as the patch left it.
    """
    wanted = [(record, wanted_bytes(site, record)) for record in journal.files]
    for record, data in wanted:
        path, backup = record.file(site), record.backup(site)
        if data is not None:
            like = backup if backup.is_file() else path
            disk.write(path, data, like=like, stamp=None if record.kept_edits else record.original_stamp())
        _bytecode_back(site, journal, record, disk)
    for record, _ in wanted:
        path = record.file(site)
        promised = record.kept_edits or record.before
        if sha256(path.read_bytes()) != promised:
            raise PatchError(f"{path} does not hold what was written", "see the disk's health")
        if not record.kept_edits:
            disk.stamp(path, record.original_stamp())  # after the last look, which moves the time of access


def wanted_bytes(site: Site, record: FileRecord) -> bytes | None:
    """Give what a file must hold after a restore, or None when it does so already.

    Raises:
        PatchError: that cannot be said with certainty.
    """
    path = record.file(site)
    current = _read(path)
    if sha256(current) == (record.kept_edits or record.before):
        return None
    if not record.kept_edits and sha256(current) != record.after:
        raise PatchError(
            f"{path} was changed while hsdump was interrupted: it is neither the original nor the patched file",
            f"compare it with {record.backup(site).name}, and put that back by hand",
        )
    backup = record.backup(site)
    original = backup.read_bytes() if backup.is_file() else b""
    if not record.kept_edits and sha256(original) == record.before:
        return original
    taken = take_out(current, record.texts)
    if taken is not None and sha256(taken) == (record.kept_edits or record.before):
        return taken
    raise PatchError(
        f"the original of {path} cannot be given back: its backup is missing or damaged, and without hsdump's blocks "
        "the file does not have the original's hash",
        "install the same SGLang release again",
    )


def keep_bytecode(site: Site, journal: Journal, record: FileRecord, disk: Disk) -> None:
    """Put the original's compiled files aside: some are used without a look at the source."""
    path = record.file(site)
    for compiled in sorted((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc")):
        disk.make_folder(journal.keep(site))
        record.bytecode.append(compiled.name)
        journal.write(site, disk)
        disk.replace(compiled, _kept(site, journal, record, compiled.name))


def _bytecode_back(site: Site, journal: Journal, record: FileRecord, disk: Disk) -> None:
    """Remove what was compiled from the patched file; the original's own compiled files fit again."""
    path = record.file(site)
    folder = path.parent / "__pycache__"
    back = {name for name in record.bytecode if _kept(site, journal, record, name).is_file()}
    for compiled in sorted(folder.glob(f"{path.stem}.*.pyc")):
        # The original's own: never put aside, since the apply stopped before, or put back already by a killed restore.
        own = compiled.name in record.bytecode or journal.state == APPLYING
        if compiled.name in back or not own or record.kept_edits:
            disk.remove(compiled)
    for name in sorted(back):
        if record.kept_edits:
            disk.remove(_kept(site, journal, record, name))
        else:
            disk.replace(_kept(site, journal, record, name), folder / name)


def _kept(site: Site, journal: Journal, record: FileRecord, name: str) -> Path:
    return journal.keep(site) / f"{record.path.replace('/', '.')}-{name}"


def sweep(site: Site, disk: Disk) -> None:
    """Remove what crashes left in the state folder and beside the files: half-written files, code of no patch."""
    journals = read_journals(site)
    needed = {journal.patch_id for journal in journals if journal.state not in (RESTORED, ROLLED_BACK)}
    if site.state.is_dir():
        for path in list(site.state.iterdir()):
            name, _, what = path.name.partition("-")
            if what in ("code", "bytecode") and name not in needed:
                disk.remove_folder(path)
            elif path.name.endswith(PARTIAL):
                disk.remove(path)
    for journal in journals:
        for record in journal.files:
            for path in (record.file(site), record.backup(site)):
                disk.remove(path.with_name(path.name + PARTIAL))


def is_overwritten(site: Site, journal: Journal) -> bool:
    """Tell whether SGLang was installed again over the patch: every file is there as its wheel has it, or is gone."""
    if not site.hashes:
        return False
    for record in journal.files:
        path = record.file(site)
        if path.is_file() and (marks(path.read_bytes()) or sha256(path.read_bytes()) != site.hashes.get(record.path)):
            return False
    return any(not record.file(site).is_file() or _hash(record.file(site)) != record.before for record in journal.files)


def _hash(path: Path) -> str:
    return sha256(path.read_bytes())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PatchError(f"{path} cannot be read ({error})", "install the same SGLang release again") from error
