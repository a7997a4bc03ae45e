"""Bringing a store back to what was promised, after anything: kill -9, power loss, a deleted index, a torn shard.

Everything here is idempotent, so dying inside recovery is recovered from as well. What cannot be used is moved to
`quarantine/` with its reason in the index's event log; nothing is ever deleted except files that no commit has named.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from hsdump.arrays import xxh3
from hsdump.errors import StoreCorrupt
from hsdump.store.disk import Disk, write_file
from hsdump.store.format import Inventory, SampleRecord, ShardFormatError, read_inventory
from hsdump.store.index import FILE_NAME as INDEX_FILE
from hsdump.store.index import Index, ShardRow
from hsdump.store.manifest import FILE_NAME as MANIFEST_FILE
from hsdump.store.manifest import Manifest, encode_manifest, read_manifest

BLOCK_BYTES = 8 << 20


def shards_folder(path: Path) -> Path:
    return path / "shards"


def quarantine_folder(path: Path) -> Path:
    return path / "quarantine"


def recover_manifest(path: Path, disk: Disk) -> Manifest | None:
    """Read the manifest, taking it from a shard again when the file is lost or damaged."""
    try:
        found = read_manifest(path)
    except StoreCorrupt:
        _quarantine(path, disk, path / MANIFEST_FILE)
        found = None
    if found is not None:
        return found
    for shard in sorted(shards_folder(path).glob("*.safetensors")):
        try:
            inventory, _ = read_inventory(shard)
            manifest = msgspec.json.decode(inventory.manifest, type=Manifest)
        except (ShardFormatError, msgspec.MsgspecError):
            continue
        write_file(disk, path / MANIFEST_FILE, encode_manifest(manifest))
        return manifest
    return None


def open_index(path: Path, disk: Disk) -> Index:
    """Open the index; one that cannot be read is put aside and started anew (the shards then fill it)."""
    try:
        return Index(path)
    except StoreCorrupt as error:
        for name in (INDEX_FILE, f"{INDEX_FILE}-wal", f"{INDEX_FILE}-shm"):
            if (path / name).exists():
                _quarantine(path, disk, path / name)
        index = Index(path)
        index.record_event(f"the index was unreadable and was rebuilt from the shards: {error.what}")
        return index


def recover_shards(path: Path, disk: Disk, index: Index, manifest: Manifest) -> None:
    """Make index and shards agree: every whole shard has its rows, every row its shard."""
    for partial in shards_folder(path).glob("*.partial"):
        index.record_event(f"{partial.name}: {partial.stat().st_size} bytes never committed, removed")
        disk.unlink(partial)
    known = index.shards()
    present = {shard.name: shard for shard in sorted(shards_folder(path).glob("*.safetensors"))}
    for name, row in known.items():
        if name not in present:
            lost = index.forget_shard(name)
            index.record_event(f"{name} is gone; its {lost} samples are missing again")
        elif not _is_as_committed(present[name], row):
            lost = index.forget_shard(name)
            _quarantine(path, disk, present.pop(name))
            index.record_event(f"{name} is not what was committed; quarantined, its {lost} samples are missing again")
    for name in present.keys() - known.keys():
        _adopt(path, disk, index, manifest, present[name])


def _adopt(path: Path, disk: Disk, index: Index, manifest: Manifest, shard: Path) -> None:
    """Index a shard that has no row: the writer died between rename and index transaction, or the index was lost."""
    try:
        inventory, head = read_inventory(shard)
        if inventory.manifest_digest != manifest.digest:
            raise ShardFormatError("it belongs to a store with another manifest")
        damaged = damaged_tensors(shard, inventory)
        if damaged:
            raise ShardFormatError(f"checksums differ: {', '.join(damaged[:5])}")
    except ShardFormatError as error:
        _quarantine(path, disk, shard)
        index.record_event(f"{shard.name} had no index rows and cannot be used; quarantined: {error}")
        return
    samples = _not_yet_there(index, inventory)
    index.commit_shard(ShardRow(shard.name, shard.stat().st_size, xxh3(head)), samples)
    index.record_event(f"{shard.name} had no index rows; {len(samples)} samples indexed after their checksums held")


def _not_yet_there(index: Index, inventory: Inventory) -> list[SampleRecord]:
    return [sample for sample in inventory.samples if index.sample(sample.key) is None]


def damaged_tensors(shard: Path, inventory: Inventory) -> list[str]:
    """Read a whole shard and give the `key/name` of every tensor whose checksum differs."""
    damaged = []
    with shard.open("rb") as file:
        for sample in inventory.samples:
            for tensor in sample.tensors:
                file.seek(tensor.offset)
                blocks, left = [], tensor.num_bytes
                while left and (block := file.read(min(left, BLOCK_BYTES))):
                    blocks.append(block)
                    left -= len(block)
                if xxh3(*blocks) != tensor.xxh3:
                    damaged.append(f"{sample.key}/{tensor.name}")
    return damaged


def _is_as_committed(shard: Path, row: ShardRow) -> bool:
    """A quick look, at size and header; tensor bytes are `verify`'s business."""
    try:
        _, head = read_inventory(shard)
    except ShardFormatError:
        return False
    return shard.stat().st_size == row.num_bytes and xxh3(head) == row.header_xxh3


def _quarantine(path: Path, disk: Disk, file: Path) -> None:
    folder = quarantine_folder(path)
    disk.make_folder(folder)
    target, number = folder / file.name, 0
    while target.exists():
        number += 1
        target = folder / f"{file.name}.{number}"
    disk.rename(file, target)
    disk.sync_folder(folder)
    disk.sync_folder(file.parent)
