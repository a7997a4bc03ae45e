"""Opening a store for writing: the folder, the lock, what a crash left, and whether it is the same data set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hsdump.errors import StoreError, StoreMismatch, UsageError
from hsdump.store import recovery
from hsdump.store.attach import Attached, RemoteOptions
from hsdump.store.format import LOCK_NAME, MANIFEST_NAME, OWN_NAMES, SHARDS_FOLDER
from hsdump.store.fs import Fs
from hsdump.store.index import Event, Index
from hsdump.store.lock import WriterLock
from hsdump.store.manifest import Manifest, differences, encode_manifest
from hsdump.store.remote import as_url


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedStore:
    """A store that is locked, in order, and the one that was asked for."""

    path: Path
    manifest: Manifest
    index: Index
    lock: WriterLock
    events: list[Event]
    """What had to be put in order."""

    attached: Attached | None
    """The store's URL, where it has one."""

    def close(self) -> None:
        self.index.close()
        self.lock.release()


def open_store(path: Path, manifest: Manifest | None, fs: Fs, remote: RemoteOptions) -> OpenedStore:
    """Lock a store, recover it, and refuse it if it is another one.

    Args:
        manifest: what the store must be, written where there is none yet; None takes an existing store as it is.

    Raises:
        UsageError: a URL instead of a folder.
        StoreError: the folder cannot be written, holds something else, or (without a manifest) is no store.
        StoreBusy: another process writes it.
        StoreMismatch: it was made with other facts, or belongs to another URL.
        RemoteError: its URL cannot be reached.
    """
    if as_url(path):
        what = f"{as_url(path)} is a URL; samples are committed to a local folder first"
        raise UsageError(what, "name a local folder, and the URL with --remote (hsdump extract, hsdump store push)")
    if manifest is None and not (path / SHARDS_FOLDER).is_dir():
        raise StoreError(f"{path} is not a store", "name the folder that `hsdump extract --out` wrote")
    lock = _take_folder(path, fs)
    try:
        with disk_errors(path):
            attached = Attached.open(path, remote, fs)
            try:
                return _recover(path, manifest, fs, lock, attached)
            except StoreError:
                if attached is not None:
                    attached.give_up(fs)
                raise
    except BaseException:
        lock.release()
        raise


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Say what the disk refused in words of ours."""
    try:
        yield
    except OSError as error:
        what = f"{path}: {error.strerror or error} ({error.filename or 'while writing'})"
        fix = "make room or repair the disk, then run the same command again; committed samples are safe"
        raise StoreError(what, fix) from error


def _recover(path: Path, manifest: Manifest | None, fs: Fs, lock: WriterLock, attached: Attached | None) -> OpenedStore:
    events: list[Event] = []
    if attached is not None:
        if manifest is not None:
            attached.agree_on(manifest, put=False)
        attached.restore_manifest(fs)
    stored = recovery.load_manifest(path, fs, events)
    if stored is None:
        if manifest is None:
            raise StoreError(f"{path} holds no sample and no manifest", "there is nothing to save; remove it")
        fs.write_file(path / MANIFEST_NAME, encode_manifest(manifest))
        stored = manifest
    if manifest is not None:
        _refuse_other(path, stored, manifest)
    if attached is not None:
        attached.agree_on(stored, put=True)
    index = recovery.open_index(path, stored, fs, events, attached)
    try:
        recovery.recover(path, index, stored, fs, events, attached)
    except BaseException:
        index.close()
        raise
    return OpenedStore(path=path, manifest=stored, index=index, lock=lock, events=events, attached=attached)


def _take_folder(path: Path, fs: Fs) -> WriterLock:
    """Make the folder where needed, prove that it can be written, take the lock."""
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path} is a file", "name a folder for the store")
    strangers = sorted(entry.name for entry in path.iterdir() if entry.name not in OWN_NAMES) if path.is_dir() else []
    if strangers and not (path / MANIFEST_NAME).exists():
        what = f"{path} is no store and not empty: it holds {', '.join(strangers[:3])}"
        raise StoreError(what, "name a new or empty folder")
    try:
        fs.make_folder(path / SHARDS_FOLDER)
        return WriterLock(path / LOCK_NAME)
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror or error}"
        raise StoreError(what, "name a writable folder on a disk with room, or change its rights") from error


def _refuse_other(path: Path, stored: Manifest, asked: Manifest) -> None:
    found = differences(stored, asked)
    if found:
        what = f"{path} was made with other settings:\n    " + "\n    ".join(found)
        raise StoreMismatch(what, "use the same settings again, or name another folder for this data set")
