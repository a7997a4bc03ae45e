"""Reads shards: header, mapped bytes, and the proof that the bytes are what was committed."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import xxhash

from hsdump.errors import StoreCorrupt
from hsdump.store.format import SampleRecord, ShardHeader, TensorEntry, decode_header, header_size, shard_number

BLOCK_BYTES = 1 << 20


def read_header(path: Path) -> tuple[ShardHeader, int]:
    """Read and check a shard's header.

    Returns:
        The header and its size in bytes.

    Raises:
        StoreCorrupt: it is damaged, or the file is not the shard that its name says.
        OSError: the file cannot be read.
    """
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        size = header_size(first, file_bytes, path.name)
        header = decode_header(first + file.read(size - 8), file_bytes, path.name)
    if header.number != shard_number(path.name):
        fix = "give the shards their own names back; `hsdump store scrub --repair STORE` sets them apart"
        raise StoreCorrupt(f"{path.name} is shard {header.number} under another name", fix)
    return header, size


def map_file(path: Path, num_bytes: int) -> mmap.mmap:
    """Map a whole shard for reading.

    Raises:
        StoreCorrupt: it does not have the length that the index knows; touching a map beyond the end would kill us.
        OSError: it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(fd).st_size
        if found != num_bytes:
            fix = "see what is lost with `hsdump store scrub STORE`, then --repair"
            raise StoreCorrupt(f"{path.name} has {found} bytes instead of {num_bytes}", fix)
        return mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def damaged_tensors(fd: int, record: SampleRecord) -> list[str]:
    """Name the tensors of a sample whose bytes do not have their checksums; reads with bounded memory."""
    return [entry.name for entry in record.tensors if _checksum(fd, entry) != entry.checksum]


def damaged_pads(path: Path, header: ShardHeader) -> list[int]:
    """Give the offsets of pads that are not zero."""
    with path.open("rb", buffering=0) as file:
        return [offset for offset, size in header.pads if any(os.pread(file.fileno(), size, offset))]


def check_shard(path: Path) -> tuple[ShardHeader, int]:
    """Read a whole shard and prove it.

    Raises:
        StoreCorrupt: names the first sample and tensor that do not hold.
    """
    header, size = read_header(path)
    with path.open("rb", buffering=0) as file:
        for record in header.samples:
            damaged = damaged_tensors(file.fileno(), record)
            if damaged:
                what = f"{path.name}: sample {record.key} has wrong bytes in {', '.join(damaged)}"
                raise StoreCorrupt(what, "it will be captured again by the next `hsdump extract`")
    pads = damaged_pads(path, header)
    if pads:
        raise StoreCorrupt(f"{path.name}: padding at byte {pads[0]} is not zero", "copy the shard from a backup")
    return header, size


def _checksum(fd: int, entry: TensorEntry) -> str:
    """Hash a tensor in blocks that fit the cache; a file that ends early gives a checksum that is no tensor's."""
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(min(BLOCK_BYTES, entry.num_bytes)))
    offset, end = entry.offset, entry.offset + entry.num_bytes
    while offset < end:
        size = os.preadv(fd, [block[: end - offset]], offset)
        if size == 0:
            break
        digest.update(block[:size])
        offset += size
    return digest.hexdigest()
