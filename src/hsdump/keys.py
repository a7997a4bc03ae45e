"""A set of keys that holds millions in little memory: Python's own takes ten times the keys' size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import final

KEY_BYTES = 16
"""A key is 32 hex digits, as `hsdump.arrays.xxh3` gives them."""

_HEAD_BYTES = 2
_TAIL_BYTES = KEY_BYTES - _HEAD_BYTES


@final
class KeySet:
    """Keys by their first two bytes, in one string of bytes for each: 22 MB for a million keys, where a set of text
    takes 124. A look-up searches 1/65536 of the keys.

    One thread at a time may change it; any may look meanwhile, for what they look at is replaced, never changed.
    """

    __slots__ = ("_count", "_tails")

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._tails = [b""] * (1 << 8 * _HEAD_BYTES)
        self._count = 0
        self.update(keys)

    def unpack(self, packed: bytes) -> None:
        """Take in what `pack` gave.

        Raises:
            ValueError: it is no whole number of keys.
        """
        if len(packed) % KEY_BYTES:
            raise ValueError(f"{len(packed)} bytes are no whole number of keys")
        for at in range(0, len(packed), KEY_BYTES):
            self._add(packed[at : at + KEY_BYTES])

    def pack(self) -> bytes:
        """Give all keys as bytes, 16 each, in their order."""
        return b"".join(self._raw())

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: str) -> bool:
        raw = _bytes_of(key)
        return raw is not None and _find(self._tails[_bucket(raw)], raw) >= 0

    def __iter__(self) -> Iterator[str]:
        return (raw.hex() for raw in self._raw())

    def add(self, key: str) -> bool:
        """Take a key in.

        Returns:
            True if it was new.

        Raises:
            ValueError: it is no key.
        """
        raw = _bytes_of(key)
        if raw is None:
            raise ValueError(f"{key!r} is no key of {2 * KEY_BYTES} hex digits")
        return self._add(raw)

    def update(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.add(key)

    def discard(self, key: str) -> None:
        """Take a key out, if it is there."""
        raw = _bytes_of(key)
        if raw is None:
            return
        tails = self._tails[_bucket(raw)]
        at = _find(tails, raw)
        if at >= 0:
            self._tails[_bucket(raw)] = tails[:at] + tails[at + _TAIL_BYTES :]
            self._count -= 1

    def difference_update(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.discard(key)

    def _add(self, raw: bytes) -> bool:
        bucket = _bucket(raw)
        tails = self._tails[bucket]
        if _find(tails, raw) >= 0:
            return False
        self._tails[bucket] = tails + raw[_HEAD_BYTES:]
        self._count += 1
        return True

    def _raw(self) -> Iterator[bytes]:
        for head, tails in enumerate(self._tails):
            if not tails:
                continue
            first = head.to_bytes(_HEAD_BYTES, "big")
            found = (tails[at : at + _TAIL_BYTES] for at in range(0, len(tails), _TAIL_BYTES))
            yield from (first + tail for tail in sorted(found))


def is_key(text: str) -> bool:
    return _bytes_of(text) is not None


def _bytes_of(key: str) -> bytes | None:
    try:
        raw = bytes.fromhex(key)
    except ValueError:
        return None
    return raw if len(raw) == KEY_BYTES else None


def _bucket(raw: bytes) -> int:
    return raw[0] << 8 | raw[1]


def _find(tails: bytes, raw: bytes) -> int:
    """Give a key's place, or -1. Bytes that happen to be the same across two neighbours are none."""
    tail = raw[_HEAD_BYTES:]
    at = tails.find(tail)
    while at > 0 and at % _TAIL_BYTES:
        at = tails.find(tail, at + 1)
    return at
