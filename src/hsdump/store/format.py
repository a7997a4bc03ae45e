"""The bytes of a shard: a plain safetensors file with fixed header room, aligned tensors and its own inventory.

    offset 0          header length, u64 little endian, always HEADER_BYTES - 8
    offset 8          safetensors header: JSON, padded with spaces
    offset HEADER_BYTES   tensors, each at a multiple of 64 bytes, gaps filled by U8 tensors `~pad/<n>`, because
                      safetensors allows no holes

The room for the header is fixed so that tensors can be streamed to their final place before the header is known:
nothing is written twice. Specification: docs/format.md.

Letters: S = tokens of one sample, H = hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

HEADER_BYTES = 1 << 20
ALIGN = 64
SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int64": "I64", "uint8": "U8"}
PAD_PREFIX = "~pad/"

INPUT_IDS = "input_ids"
LOSS_MASK = "loss_mask"


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One tensor of one sample: where its bytes are and what they must be."""

    name: str
    dtype: str
    """A key of SAFETENSORS_DTYPES."""

    shape: list[int]
    offset: int
    """From the start of the file."""

    num_bytes: int
    xxh3: str


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of a shard: all that the index keeps, so that the index can be rebuilt from shards alone."""

    key: str
    source: str
    num_tokens: int
    loss_tokens: int
    attempts: int
    tensors: list[TensorRecord]


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """The shard's `__metadata__`: whose shard it is and what it holds."""

    manifest_digest: str
    manifest: str
    """The whole manifest as JSON: a lost `manifest.json` is found here again."""

    samples: list[SampleRecord]


class ShardFormatError(ValueError):
    """These bytes are no shard; says what is wrong."""


def shard_name(number: int) -> str:
    """Name shard `number`, counted from 1."""
    return f"{number:06d}.safetensors"


def aligned(offset: int) -> int:
    """Give the next multiple of ALIGN."""
    return -(-offset // ALIGN) * ALIGN


def header_room(inventory_bytes: int, num_tensors: int) -> int:
    """Estimate the header from above, to know when a shard is full. About 160 bytes a tensor, keys included."""
    return inventory_bytes + 320 * num_tensors + 4096


def encode_header(inventory: Inventory, end: int) -> bytes:
    """Build the HEADER_BYTES before the tensors.

    Args:
        inventory: the shard's samples, in the order of their bytes.
        end: size of the whole file.

    Raises:
        ShardFormatError: more than fits; the writer closes shards before that.
    """
    header: dict[str, Any] = {
        "__metadata__": {"format": "hsdump-shard-1", "hsdump": msgspec.json.encode(inventory).decode()}
    }
    position = HEADER_BYTES
    for sample in inventory.samples:
        for tensor in sample.tensors:
            _pad(header, position, tensor.offset)
            header[f"{sample.key}/{tensor.name}"] = _entry(
                SAFETENSORS_DTYPES[tensor.dtype], tensor.shape, tensor.offset, tensor.num_bytes
            )
            position = tensor.offset + tensor.num_bytes
    _pad(header, position, end)
    body = msgspec.json.encode(header)
    if len(body) > HEADER_BYTES - 8:
        raise ShardFormatError(f"the header takes {len(body)} bytes, there is room for {HEADER_BYTES - 8}")
    return (HEADER_BYTES - 8).to_bytes(8, "little") + body.ljust(HEADER_BYTES - 8)


def read_inventory(path: Path) -> tuple[Inventory, bytes]:
    """Read a shard's header and check that the file has the size it says.

    Returns:
        The inventory, and the header's raw bytes for its checksum.

    Raises:
        ShardFormatError: no shard of ours, or cut short.
    """
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES or int.from_bytes(head[:8], "little") != HEADER_BYTES - 8:
        raise ShardFormatError(f"{path.name}: no hsdump shard (header of {len(head)} bytes)")
    try:
        header = msgspec.json.decode(head[8:])
        inventory = msgspec.json.decode(header["__metadata__"]["hsdump"], type=Inventory)
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ShardFormatError(f"{path.name}: its header is damaged ({error})") from error
    size = path.stat().st_size
    if size != HEADER_BYTES + end:
        raise ShardFormatError(f"{path.name}: {size} bytes, its header says {HEADER_BYTES + end}")
    return inventory, head


def _entry(dtype: str, shape: list[int], start: int, num_bytes: int) -> dict[str, Any]:
    begin = start - HEADER_BYTES
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + num_bytes]}


def _pad(header: dict[str, Any], start: int, end: int) -> None:
    if end > start:
        header[f"{PAD_PREFIX}{start}"] = _entry("U8", [end - start], start, end - start)
