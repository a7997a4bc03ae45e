"""Giving the originals back, byte for byte, mode and times too, and proving it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hsdump.errors import PatchError
from hsdump.locks import is_held, left_behind
from hsdump.patch.blocks import insert, marks, take_out
from hsdump.patch.disk import Disk, Stamp
from hsdump.patch.importing import check_imports
from hsdump.patch.journal import (
    APPLIED,
    BACKUP,
    OPEN,
    OVERWRITTEN,
    RESTORED,
    RESTORING,
    FileRecord,
    Journal,
    locked,
    open_journal,
    read_journals,
)
from hsdump.patch.live import refuse_gpu_memory, refuse_running
from hsdump.patch.recovery import is_overwritten, put_back, recover, sweep
from hsdump.patch.site import Site, sha256, unified

RUN_LOCK = "run.lock"
"""In the state folder, held by a living `hsdump run`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreOptions:
    """What `hsdump patch restore` was asked for."""

    keep_edits: bool = False
    without_backup: bool = False
    import_check: bool = True
    force: bool = False
    """Although a server seems to run, or GPU memory is held."""

    owner: str = ""
    """The caller is the `hsdump run` that applied it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What a restore did."""

    patch_id: str | None
    """None: there was nothing to restore."""

    outcome: str
    files: dict[str, str] = field(default_factory=dict)
    """File -> sha256 of what it holds now, looked at after the last write."""

    proofs: tuple[str, ...] = ()


def restore(site: Site, options: RestoreOptions, disk: Disk | None = None) -> Restored:
    """Take the patch out of the environment; without one, do nothing and say so.

    Raises:
        PatchError: edits since, a backup that is not what it was, a server that runs, memory that is held.
    """
    disk = disk or Disk()
    with locked(site, disk):
        journal = open_journal(site)
        if journal is None:
            return Restored(patch_id=None, outcome="nothing is patched here")
        _refuse_owned(site, options)
        if journal.state != APPLIED:
            if not options.force:
                refuse_running(site, "--force")
            finished = recover(site, disk)
            assert finished is not None
            return _report(site, finished, finished.state)
        if is_overwritten(site, journal):
            return _overwritten(site, journal, disk)
        _settle_contents(site, journal, options)
        proofs = []
        if not options.force:
            refuse_running(site, "--force")
            proofs.append("no process runs from this environment")
            proofs.append(refuse_gpu_memory(site))
        _carry_out(site, journal, disk)
    if options.import_check and site.python:
        proofs.append(check_imports(site, {}, []))
    return _report(site, journal, "restored, with edits kept" if options.keep_edits else "restored", proofs)


def _carry_out(site: Site, journal: Journal, disk: Disk) -> None:
    try:
        journal.state = RESTORING
        journal.note("restore began")
        journal.write(site, disk)
        put_back(site, journal, disk)
        journal.state = RESTORED
        journal.note("restored: every file equals its original, mode, owner and times too")
        journal.write(site, disk)
        sweep(site, disk)
    except OSError as error:
        raise PatchError(
            f"{site.root} could not be written: {error}", "free some space, then restore again: it goes on from here"
        ) from error


def _refuse_owned(site: Site, options: RestoreOptions) -> None:
    if not options.owner and is_held(site.state / RUN_LOCK):
        raise PatchError(
            "a living `hsdump run` owns this patch, and restores it when its server ends",
            "end that one with Ctrl-C, or use `hsdump detach` afterwards",
        )


def _settle_contents(site: Site, journal: Journal, options: RestoreOptions) -> None:
    """Make sure that what will be written is the original, before anything is."""
    for record in journal.files:
        path = record.file(site)
        if not path.is_file():
            raise PatchError(f"{path} is gone", "install the same SGLang release again; then restore notices that")
        current = path.read_bytes()
        backup = record.backup(site)
        original = backup.read_bytes() if backup.is_file() else None
        sound = original is not None and sha256(original) == record.before
        if sha256(current) not in (record.after, record.before):
            _settle_edited(site, record, current, original if sound else None, options)
        elif not sound and sha256(current) == record.after and not _settle_lost(record, current, options):
            problem = "is missing" if original is None else "is not what was saved: its hash differs"
            raise PatchError(
                f"the backup {backup} {problem}",
                "--without-backup takes hsdump's blocks out of the patched file instead, and proves the result by the "
                f"original's hash; or install SGLang {journal.sglang_version} again",
            )


def _settle_lost(record: FileRecord, current: bytes, options: RestoreOptions) -> bool:
    """Tell whether the original can be had without its backup, when the user asked for that."""
    if not options.without_backup:
        return False
    taken = take_out(current, record.texts)
    return taken is not None and sha256(taken) == record.before


def _settle_edited(
    site: Site, record: FileRecord, current: bytes, original: bytes | None, options: RestoreOptions
) -> None:
    merged = take_out(current, record.texts) if marks(current) else current
    if options.keep_edits:
        if merged is None:
            raise PatchError(
                f"{record.file(site)} was edited inside hsdump's own block, so the edits cannot be told from it",
                "take the block out by hand (between the >>> and <<< lines), then restore with --keep-edits",
            )
        try:
            compile(merged, record.path, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise PatchError(f"with the edits, {record.path} does not compile ({error})", "mend the edits") from error
        record.kept_edits = sha256(merged)
        return
    raise PatchError(
        f"{record.file(site)} was edited after hsdump patched it:\n{three_way(record, current, original)}",
        "--keep-edits gives the original back with these edits in it; "
        f"to give them up, put {record.backup(site).name} back by hand",
    )


def three_way(record: FileRecord, current: bytes, original: bytes | None) -> str:
    """Show original, patched and current text as two differences from the patched one."""
    if original is None:
        return "(without a sound backup, the edits cannot be shown)"
    patched = insert(original, record.texts)
    ours = unified(original, patched, f"{record.path} original", f"{record.path} patched by hsdump")
    theirs = unified(patched, current, f"{record.path} patched by hsdump", f"{record.path} now")
    return f"--- what hsdump did\n{ours}--- what somebody did since\n{theirs}".rstrip()


def _overwritten(site: Site, journal: Journal, disk: Disk) -> Restored:
    journal.state = OVERWRITTEN
    journal.note("SGLang was installed again over the patch; nothing of it is left, nothing was written")
    journal.write(site, disk)
    sweep(site, disk)
    outcome = f"SGLang was installed again since (now {site.version}); nothing of the patch is left"
    return Restored(patch_id=journal.patch_id, outcome=outcome)


def _report(site: Site, journal: Journal, outcome: str, proofs: list[str] | None = None) -> Restored:
    files = {record.path: sha256(record.file(site).read_bytes()) for record in journal.files}
    for record in journal.files:
        if not record.kept_edits:
            stamp, found = record.original_stamp(), Stamp.of(record.file(site))
            Disk().stamp(record.file(site), stamp)
            assert (stamp.mode, stamp.uid, stamp.gid, stamp.mtime_ns) == (
                found.mode,
                found.uid,
                found.gid,
                found.mtime_ns,
            )
    equal = all(files[record.path] == record.before for record in journal.files)
    proofs = [*(proofs or []), "sha256 of every file equals the original's" if equal else "edits were kept"]
    return Restored(patch_id=journal.patch_id, outcome=outcome, files=files, proofs=tuple(proofs))


def clean(site: Site, *, orphans: bool = False, disk: Disk | None = None) -> list[str]:
    """Remove backups and journals of patches that are not in the files any more.

    Args:
        orphans: also backups that no journal knows.

    Returns:
        What was removed, relative to the environment.

    Raises:
        PatchError: a patch is in the files.
    """
    disk = disk or Disk()
    removed = []
    with locked(site, disk):
        journal = open_journal(site)
        if journal is not None:
            raise PatchError(
                f"patch {journal.patch_id} is {journal.state}: its backup and journal are needed",
                f"hsdump patch restore {site.how_to_name}",
            )
        sweep(site, disk)
        journals = read_journals(site)
        known = {record.backup(site) for journal in journals for record in journal.files}
        for backup in sorted(known | (set(find_orphans(site)) if orphans else set())):
            if backup.is_file():
                disk.remove(backup)
                removed.append(site.relative(backup))
        for journal in journals:
            assert journal.state not in OPEN
            disk.remove(journal.path(site))
            removed.append(site.relative(journal.path(site)))
            for folder in (journal.keep(site), site.state / f"{journal.patch_id}-code"):
                disk.remove_folder(folder)
        # Held while it goes: a run that is just starting would lose it, and a second one take its patch for a crash's.
        with left_behind(site.state / RUN_LOCK) as dead:
            if dead:
                disk.remove(site.state / RUN_LOCK)
    return removed


def find_orphans(site: Site) -> list[Path]:
    """Find backups that no journal knows: made by hand, or by a hsdump whose journal is gone."""
    known = {record.backup(site) for journal in read_journals(site) for record in journal.files}
    return sorted(path for path in site.package.rglob(f"*{BACKUP}") if path not in known)
