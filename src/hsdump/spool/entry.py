"""The bytes of one spool entry, and nothing else.

    offset 0   magic `HSDSPL1\\n`, 8 bytes
    offset 8   header length, unsigned 64-bit little endian
    offset 16  header: JSON, padded with spaces so that the payload starts at a multiple of 64
    payload    `token_ids` int64 [S], then each state [S, H] in the order of `StateShape.names`; every block
               starts at a multiple of 64 bytes

Letters: S = tokens of the request, H = hidden size.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from hsdump.schema import StateShape

MAGIC = b"HSDSPL1\n"
ALIGN = 64
MAX_HEADER_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class EntryLayout:
    """Where each block of an entry lies. Pure arithmetic: both sides compute the same."""

    shape: StateShape
    num_tokens: int
    payload_offset: int

    @property
    def token_ids_bytes(self) -> int:
        return 8 * self.num_tokens

    def state_offset(self, index: int) -> int:
        """Give the first byte of state `index`, in the order of `StateShape.names`."""
        first = self.payload_offset + _aligned(self.token_ids_bytes)
        return first + index * _aligned(self.state_bytes)

    @property
    def state_bytes(self) -> int:
        return self.num_tokens * self.shape.row_bytes

    @property
    def total_bytes(self) -> int:
        return self.state_offset(len(self.shape.names))


def entry_bytes(shape: StateShape, num_tokens: int) -> int:
    """Give an upper bound of the bytes one request takes in the spool, for admission."""
    states = len(shape.names) * _aligned(num_tokens * shape.row_bytes)
    return MAX_HEADER_BYTES // 16 + _aligned(8 * num_tokens) + states


def encode_header(rid: str, shape: StateShape, num_tokens: int) -> tuple[bytes, EntryLayout]:
    """Build everything before the payload."""
    facts = {"rid": rid, "num_tokens": num_tokens, "shape": asdict(shape)}
    body = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
    length = _aligned(16 + len(body)) - 16
    head = MAGIC + length.to_bytes(8, "little") + body.ljust(length)
    return head, EntryLayout(shape, num_tokens, len(head))


def decode_header(head: bytes) -> tuple[str, EntryLayout]:
    """Read what `encode_header` wrote; `head` may be longer than the header.

    Raises:
        ValueError: these bytes are no entry.
    """
    length = int.from_bytes(head[8:16], "little")
    if head[:8] != MAGIC or not 0 < length <= MAX_HEADER_BYTES or len(head) < 16 + length:
        raise ValueError("no spool entry: magic or header length is wrong")
    facts = json.loads(head[16 : 16 + length])
    raw = facts["shape"]
    shape = StateShape(**{**raw, "layers": tuple(raw["layers"])})
    return facts["rid"], EntryLayout(shape, int(facts["num_tokens"]), 16 + length)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN
