"""What opening a store for writing puts in order after a crash. Nothing is lost silently: each act is an event.

Committed bytes are never deleted: what cannot be used goes to `quarantine/` with its reason beside it.
"""

from __future__ import annotations

import os
from pathlib import Path

from hsdump.errors import StoreCorrupt, StoreMismatch
from hsdump.store.attach import Attached
from hsdump.store.format import (
    INDEX_NAME,
    MANIFEST_NAME,
    PARTIAL_SUFFIX,
    QUARANTINE_FOLDER,
    SHARDS_FOLDER,
    shard_name,
    shard_number,
    shard_path,
)
from hsdump.store.fs import Fs
from hsdump.store.index import Event, Index, utc_now
from hsdump.store.manifest import Manifest, decode_manifest, encode_manifest
from hsdump.store.shard_reader import check_shard, read_header


def list_shards(store: Path) -> dict[int, Path]:
    """Find the files that are named like shards, in order of their numbers."""
    folder = store / SHARDS_FOLDER
    if not folder.is_dir():
        return {}
    numbered = ((shard_number(path.name), path) for path in folder.iterdir())
    return dict(sorted((number, path) for number, path in numbered if number is not None))


def quarantine(store: Path, path: Path, reason: str, fs: Fs) -> Path:
    """Set a file apart, with the reason beside it."""
    folder = store / QUARANTINE_FOLDER
    fs.make_folder(folder)
    stamp = utc_now().replace(":", "").replace("-", "")[:15]
    target = folder / f"{stamp}-{path.name}"
    while target.exists():
        target = target.with_name("again-" + target.name)
    fs.write_file(target.with_name(target.name + ".reason.txt"), (reason + "\n").encode())
    fs.rename(path, target)
    fs.sync_folder(path.parent)
    fs.sync_folder(folder)
    return target


def delete_quarantined(store: Path, number: int, fs: Fs) -> None:
    """Delete a shard that was set apart on purpose, with its reason."""
    for path in sorted((store / QUARANTINE_FOLDER).glob(f"*-{shard_name(number)}*")):
        fs.remove(path)


def load_manifest(store: Path, fs: Fs, events: list[Event]) -> Manifest | None:
    """Read the manifest, or make it again from a shard; None for a store that is empty.

    Raises:
        StoreError: it was written by a later format.
    """
    path = store / MANIFEST_NAME
    problem = "it was missing"
    if path.exists():
        try:
            return decode_manifest(path.read_bytes(), str(path))
        except StoreCorrupt as error:
            problem = error.what
    for shard in list_shards(store).values():
        try:
            header, _ = read_header(shard)
        except StoreCorrupt:
            continue
        if path.exists():
            quarantine(store, path, problem, fs)
        fs.write_file(path, encode_manifest(header.manifest))
        events.append(Event(kind="manifest-rebuilt", subject=MANIFEST_NAME, detail=f"{problem}; from {shard.name}"))
        return header.manifest
    if path.exists():
        # Nothing was ever committed under it, so a new run may write its own.
        quarantine(store, path, problem, fs)
        events.append(Event(kind="manifest-quarantined", subject=MANIFEST_NAME, detail=problem))
    return None


def open_index(store: Path, manifest: Manifest, fs: Fs, events: list[Event], attached: Attached | None = None) -> Index:
    """Open the index, or a new one where the old one is gone, damaged or of another data set: the one that was last
    published, where the store has a URL.
    """
    path = store / INDEX_NAME
    problem: str | None = None if path.exists() else "it was missing"
    if not problem:
        try:
            index = Index.create_or_open(path, fs)
            digest = index.get_meta("manifest_digest")
            if digest in {None, manifest.digest}:
                return index
            index.close()
            problem = "it belongs to another manifest"
        except StoreCorrupt as error:
            problem = error.what
    for suffix in ("-wal", "-shm", "-journal", ""):
        leftover = path.with_name(path.name + suffix)
        if leftover.exists():
            quarantine(store, leftover, problem, fs)
    restored = attached is not None and attached.restore_index(fs)
    index = Index.create_or_open(path, fs)
    if restored:
        detail = f"{problem}; failures and skips since the last publication are gone"
        events.append(Event(kind="index-restored", subject=INDEX_NAME, detail=detail))
    elif list_shards(store):
        detail = f"{problem}; failures and skips that only it knew are gone"
        events.append(Event(kind="index-rebuilt", subject=INDEX_NAME, detail=detail))
    return index


def recover(
    store: Path, index: Index, manifest: Manifest, fs: Fs, events: list[Event], attached: Attached | None = None
) -> None:
    """Make shards and index agree. A shard that is at the store's URL need not be in the folder."""
    _remove_partials(store, fs, events)
    on_disk = list_shards(store)
    indexed = {shard.number: shard for shard in index.shards()}
    for number, shard in indexed.items():
        found = on_disk[number].stat().st_size if number in on_disk else None
        if found == shard.num_bytes:
            continue
        reason = "its file is gone" if found is None else f"it has {found} bytes instead of {shard.num_bytes}"
        if attached is not None and attached.has(number, shard.num_bytes):
            if found is not None:
                quarantine(store, on_disk.pop(number), reason, fs)
                detail = f"{reason}; the one at {attached.part.url} is used"
                events.append(Event(kind="shard-quarantined", subject=shard_name(number), detail=detail))
            continue
        drop_shard(store, index, number, reason, fs, events)
        on_disk.pop(number, None)
    for number, path in on_disk.items():
        if number not in indexed:
            _adopt(store, index, path, manifest, fs, events)
    if attached is not None:
        attached.adopt_unknown(index, set(on_disk), manifest, events)
    with index.transaction():
        index.set_up(manifest.digest)
        for event in events:
            index.add_event(event)


def drop_shard(store: Path, index: Index, number: int, reason: str, fs: Fs, events: list[Event]) -> None:
    """Take a shard out: its samples count as missing again, its file (if any) goes to quarantine."""
    path = shard_path(store, number)
    lost = index.samples(number)
    if path.exists():
        quarantine(store, path, reason, fs)
        events.append(Event(kind="shard-quarantined", subject=path.name, detail=reason))
    for sample in lost:
        detail = f"{path.name}: {reason}; it will be captured again ({sample.record.source})"
        events.append(Event(kind="sample-lost", subject=sample.record.key, detail=detail))
    with index.transaction():
        index.remove_shard(number)


def _remove_partials(store: Path, fs: Fs, events: list[Event]) -> None:
    """Unfinished files hold nothing that a commit promised."""
    for folder in (store, store / SHARDS_FOLDER):
        for path in sorted(folder.glob("*" + PARTIAL_SUFFIX)):
            detail = f"{path.stat().st_size} bytes of an unfinished commit"
            fs.remove(path)
            events.append(Event(kind="partial-removed", subject=path.name, detail=detail))


def _adopt(store: Path, index: Index, path: Path, manifest: Manifest, fs: Fs, events: list[Event]) -> None:
    """Enter a whole shard that the index does not know, or set it apart."""
    try:
        header, header_bytes = check_shard(path)
        if header.manifest_digest != manifest.digest:
            raise StoreMismatch("it was made with another manifest", "merge stores with `hsdump store merge`")
    except (StoreCorrupt, StoreMismatch) as error:
        quarantine(store, path, error.what, fs)
        events.append(Event(kind="shard-quarantined", subject=path.name, detail=error.what))
        return
    _make_durable(path)
    with index.transaction():
        known = index.add_shard(header, header_bytes)
    detail = f"{len(header.samples)} samples" + (f", {len(known)} of them known already" if known else "")
    events.append(Event(kind="shard-indexed", subject=path.name, detail=detail))


def _make_durable(path: Path) -> None:
    """The crash may have come before the name was durable; the index must not know more than the disk."""
    for target in (path, path.parent):
        fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def next_shard_number(store: Path, index: Index, attached: Attached | None = None) -> int:
    """Give a number that no shard has had, those in quarantine and at the store's URL included."""
    numbers = [*list_shards(store), *(shard.number for shard in index.shards())]
    if attached is not None:
        numbers += attached.shards
    folder = store / QUARANTINE_FOLDER
    if folder.is_dir():
        set_apart = (shard_number(path.name.rpartition("-")[2]) for path in folder.iterdir())
        numbers += [number for number in set_apart if number is not None]
    return max(numbers, default=-1) + 1
