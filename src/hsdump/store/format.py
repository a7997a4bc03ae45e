"""Format v1 on disk: file names and the bytes of a shard. docs/format.md is the specification.

A shard is a safetensors file: 8 bytes of header length (little endian), a JSON header, the data. Beyond what
safetensors asks for: every tensor starts on a multiple of 64 bytes of the file, with pad tensors in between because
safetensors allows no holes; the header's metadata holds all that the index knows; and the header carries its own
checksum, so that no single bit of the file is unguarded.

Letters: S = tokens of one sample, H = hidden size.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec

from hsdump.arrays import xxh3
from hsdump.errors import StoreCorrupt
from hsdump.store.manifest import FORMAT_VERSION, Manifest

MANIFEST_NAME = "manifest.json"
INDEX_NAME = "index.sqlite"
LOCK_NAME = "writer.lock"
RUN_NAME = "run.json"
"""What the run that writes the store, or wrote it last, says of itself; nothing depends on it."""

REMOTE_NAME = "remote.json"
"""Of a folder that is the local part of a store at a URL."""

SHARDS_FOLDER = "shards"
QUARANTINE_FOLDER = "quarantine"
PARTIAL_SUFFIX = ".partial"

OWN_NAMES = frozenset(
    (
        MANIFEST_NAME,
        MANIFEST_NAME + PARTIAL_SUFFIX,
        INDEX_NAME,
        INDEX_NAME + "-wal",
        INDEX_NAME + "-shm",
        INDEX_NAME + "-journal",
        LOCK_NAME,
        RUN_NAME,
        REMOTE_NAME,
        REMOTE_NAME + PARTIAL_SUFFIX,
        INDEX_NAME + PARTIAL_SUFFIX,
        SHARDS_FOLDER,
        QUARANTINE_FOLDER,
    )
)
"""All that a store folder may hold at its top."""

ALIGNMENT = 64
"""Bytes: a cache line, and what direct reads into device memory ask for."""

MAX_HEADER_BYTES = 100_000_000
"""safetensors refuses longer headers."""

ITEM_BYTES = {"I64": 8, "U8": 1, "BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1}
"""safetensors dtypes that a shard may hold."""

STATE_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

INPUT_IDS = "input_ids"
LOSS_MASK = "loss_mask"
PAD_PREFIX = "pad/"

_HEADER_START = b'{"__metadata__":{"checksum":"'
_CHECKSUM_AT = 8 + len(_HEADER_START)
_NO_CHECKSUM = b"0" * 32
_SHARD_NAME = re.compile(r"(\d{6,})\.safetensors")


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """Where one tensor lies."""

    name: str
    """Without the sample's key: `input_ids`, `loss_mask`, `layer2`, `final`, `layer2.scale`."""

    codec: str
    dtype: str
    """safetensors name."""

    shape: list[int]
    offset: int
    """Bytes from the start of the data (in a header) or of the file (in the index)."""

    num_bytes: int
    checksum: str
    """xxh3-128 of the bytes as stored."""


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One sample as a shard's metadata tells it; the index holds the same."""

    key: str
    source: str
    num_tokens: int
    num_learned: int
    """Tokens with loss mask 1."""

    attempts: int
    tensors: list[TensorEntry]
    errors: dict[str, float] = {}
    """Lossy codecs: relative error of each state, ||decoded - original|| / ||original||."""


class _SampleMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`SampleRecord` without what the safetensors header says already."""

    key: str
    source: str
    num_tokens: int
    num_learned: int
    attempts: int
    tensors: list[tuple[str, str, str]]
    """name, codec, checksum"""

    errors: dict[str, float] = {}


class _TensorInfo(msgspec.Struct, frozen=True):
    """A tensor as safetensors writes it."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    metadata: dict[str, str] = msgspec.field(name="__metadata__")


class ShardHeader(msgspec.Struct, frozen=True, kw_only=True):
    """A shard's header, read and checked."""

    number: int
    checksum: str
    manifest: Manifest
    manifest_digest: str
    samples: list[SampleRecord]
    """With offsets from the start of the file."""

    pads: list[tuple[int, int]]
    """(offset in the file, bytes) of stretches that must be zero."""

    file_bytes: int
    """Length that the whole file must have."""


def shard_name(number: int) -> str:
    """Name a shard's file."""
    return f"{number:06d}.safetensors"


def shard_number(name: str) -> int | None:
    """Read a shard's number from its file name; None for a file that is no shard."""
    match = _SHARD_NAME.fullmatch(name)
    return int(match[1]) if match and shard_name(int(match[1])) == name else None


def shard_path(store: Path, number: int) -> Path:
    return store / SHARDS_FOLDER / shard_name(number)


def pad_bytes(num_bytes: int) -> int:
    """Give the bytes that bring a tensor's end to the next aligned place."""
    return -num_bytes % ALIGNMENT


def header_cost(record: SampleRecord) -> int:
    """Bound the bytes that a sample adds to the header, before its offsets are final.

    Its metadata sits in a JSON string, where each quote costs one byte more. Offsets have up to 15 digits, and every
    tensor may bring a pad.
    """
    meta = msgspec.json.encode(msgspec.json.encode(_meta_of(record)).decode())
    tensors = sum(2 * 130 + len(record.key) + len(entry.name) for entry in record.tensors)
    return len(meta) + tensors


def encode_header(number: int, manifest: Manifest, samples: list[SampleRecord], reserved: int | None = None) -> bytes:
    """Give everything of a shard before its data: the length, the JSON, spaces up to the data.

    Args:
        samples: with offsets from the start of the data, in the order of their bytes.
        reserved: exact size of the result, a multiple of 64; None for the shortest.

    Returns:
        Bytes whose length is a multiple of 64.
    """
    tensors: dict[str, object] = {
        "__metadata__": {
            "checksum": _NO_CHECKSUM.decode(),
            "format": "hsdump-store",
            "format_version": str(FORMAT_VERSION),
            "shard": str(number),
            "manifest_digest": manifest.digest,
            "manifest": msgspec.json.encode(manifest).decode(),
            "samples": msgspec.json.encode([_meta_of(record) for record in samples]).decode(),
        }
    }
    num_pads = 0
    for record in samples:
        for entry in record.tensors:
            end = entry.offset + entry.num_bytes
            tensors[f"{record.key}/{entry.name}"] = _TensorInfo(entry.dtype, entry.shape, (entry.offset, end))
            pad = pad_bytes(entry.num_bytes)
            if pad:
                tensors[f"{PAD_PREFIX}{num_pads}"] = _TensorInfo("U8", [pad], (end, end + pad))
                num_pads += 1
    text = msgspec.json.encode(tensors)
    assert text.startswith(_HEADER_START)
    size = reserved or 8 + len(text) + pad_bytes(8 + len(text))
    assert size % ALIGNMENT == 0, size
    assert size >= 8 + len(text), (size, len(text))
    block = bytearray((size - 8).to_bytes(8, "little") + text.ljust(size - 8))
    block[_CHECKSUM_AT : _CHECKSUM_AT + 32] = xxh3(block).encode()
    return bytes(block)


def decode_header(block: bytes, file_bytes: int, where: str) -> ShardHeader:
    """Read and check everything before a shard's data.

    Args:
        block: the file's first bytes, as many as `header_size` says.
        file_bytes: length of the file.

    Raises:
        StoreCorrupt: any bit of it is not what was written, or the file's length is not what it says.
    """
    checksum = block[_CHECKSUM_AT : _CHECKSUM_AT + 32]
    blank = b"".join((block[:_CHECKSUM_AT], _NO_CHECKSUM, block[_CHECKSUM_AT + 32 :]))
    if not block[8:].startswith(_HEADER_START) or xxh3(blank).encode() != checksum:
        raise _corrupt(where, "its header does not have the checksum that it was written with")
    try:
        header = _parse(block, checksum.decode(), file_bytes)
    except (msgspec.MsgspecError, KeyError, ValueError) as error:
        raise _corrupt(where, f"its header is not one that hsdump writes ({type(error).__name__}: {error})") from None
    if header.file_bytes != file_bytes:
        raise _corrupt(where, f"it has {file_bytes} bytes instead of {header.file_bytes}")
    return header


def _parse(block: bytes, checksum: str, file_bytes: int) -> ShardHeader:
    """Read a header whose checksum holds; raises whatever a hostile one leads to."""
    metadata = msgspec.json.decode(block[8:], type=_Header).metadata
    infos = msgspec.json.decode(block[8:], type=dict[str, dict[str, object]])
    infos.pop("__metadata__")
    tensors = {name: msgspec.convert(info, _TensorInfo) for name, info in infos.items()}
    data_at = len(block)
    data_bytes = _check_layout(tensors, file_bytes - data_at)
    metas = msgspec.json.decode(metadata["samples"], type=list[_SampleMeta])
    samples = [_record_of(meta, tensors, data_at) for meta in metas]
    pads = {name: info for name, info in tensors.items() if name.startswith(PAD_PREFIX)}
    if sum(len(record.tensors) for record in samples) + len(pads) != len(tensors):
        raise ValueError("tensors and samples do not match")
    return ShardHeader(
        number=int(metadata["shard"]),
        checksum=checksum,
        manifest=msgspec.json.decode(metadata["manifest"], type=Manifest),
        manifest_digest=metadata["manifest_digest"],
        samples=samples,
        pads=[(data_at + info.data_offsets[0], info.shape[0]) for info in pads.values()],
        file_bytes=data_at + data_bytes,
    )


def _check_layout(tensors: dict[str, _TensorInfo], data_bytes: int) -> int:
    """Prove that tensors follow each other without hole or overlap, aligned, each as long as its shape says."""
    end = 0
    for name, info in tensors.items():
        start, stop = info.data_offsets
        size = tensor_bytes(info.dtype, info.shape)
        if start != end or stop - start != size or min(info.shape, default=1) < 0:
            raise ValueError(f"{name} at {start}..{stop} after {end}, its shape takes {size} bytes")
        if start % ALIGNMENT and not name.startswith(PAD_PREFIX):
            raise ValueError(f"{name} at {start} is not aligned")
        end = stop
    if end < data_bytes:
        raise ValueError(f"{data_bytes - end} bytes belong to no tensor")
    return end


def header_size(first_bytes: bytes, file_bytes: int, where: str) -> int:
    """Read how many bytes lie before the data, from a file's first 8.

    Raises:
        StoreCorrupt: no shard begins like this.
    """
    size = 8 + int.from_bytes(first_bytes[:8], "little")
    if len(first_bytes) < 8 or size > min(file_bytes, MAX_HEADER_BYTES) or size % ALIGNMENT:
        raise _corrupt(where, f"its first 8 bytes are no header length for {file_bytes} bytes")
    return size


def tensor_bytes(dtype: str, shape: list[int]) -> int:
    """Give the size of a tensor in bytes."""
    return ITEM_BYTES[dtype] * math.prod(shape)


def _meta_of(record: SampleRecord) -> _SampleMeta:
    return _SampleMeta(
        key=record.key,
        source=record.source,
        num_tokens=record.num_tokens,
        num_learned=record.num_learned,
        attempts=record.attempts,
        tensors=[(entry.name, entry.codec, entry.checksum) for entry in record.tensors],
        errors=record.errors,
    )


def _record_of(meta: _SampleMeta, tensors: dict[str, _TensorInfo], data_at: int) -> SampleRecord:
    entries = []
    for name, codec, checksum in meta.tensors:
        info = tensors[f"{meta.key}/{name}"]
        start, end = info.data_offsets
        entries.append(TensorEntry(name, codec, info.dtype, info.shape, data_at + start, end - start, checksum))
    return SampleRecord(
        key=meta.key,
        source=meta.source,
        num_tokens=meta.num_tokens,
        num_learned=meta.num_learned,
        attempts=meta.attempts,
        tensors=entries,
        errors=meta.errors,
    )


def _corrupt(where: str, what: str) -> StoreCorrupt:
    return StoreCorrupt(
        f"{where} is damaged: {what}", "see what is lost with `hsdump store scrub STORE`, then --repair"
    )
