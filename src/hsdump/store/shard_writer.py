"""Writes one shard front to back, although its header comes first and is known last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hsdump.store.codecs import Encoded
from hsdump.store.format import (
    ALIGNMENT,
    MAX_HEADER_BYTES,
    PARTIAL_SUFFIX,
    SampleRecord,
    ShardHeader,
    TensorEntry,
    decode_header,
    encode_header,
    header_cost,
    pad_bytes,
    shard_path,
)
from hsdump.store.manifest import Manifest
from hsdump.store.options import WriterOptions
from hsdump.store.past_cache import PastCache

BUFFER_BYTES = 4 << 20
"""A shard up to this size is kept in memory and written in one go, with a header of its exact size."""

MAX_RESERVE_BYTES = 1 << 20
"""A larger shard's header has a place of fixed size at the front of the file; at most a quarter of its data."""


class ShardWriter:
    """An unfinished shard: `NNNNNN.safetensors.partial` until `finish`, which does not make the new name durable."""

    def __init__(self, store: Path, number: int, manifest: Manifest, options: WriterOptions) -> None:
        """Args:
        options: `shard_bytes` is how large it will probably get, to size the header's place.
        """
        self.number = number
        self.samples: list[SampleRecord] = []
        self.data_bytes = 0
        """Of all that has a place, written or not."""

        self._path = shard_path(store, number)
        self._partial = self._path.with_name(self._path.name + PARTIAL_SUFFIX)
        self._manifest, self._fs, self._expected_bytes = manifest, options.fs, options.shard_bytes
        self._direct = options.direct
        self._header_bytes = len(encode_header(number, manifest, [])) + 64
        self._buffer: list[bytes] = []
        self._fd: int | None = None
        self._past_cache: PastCache | None = None
        self._reserve: int | None = None

    def has_room_for(self, record: SampleRecord) -> bool:
        """Tell whether the header can take another sample."""
        return self._header_bytes + header_cost(record) <= (self._reserve or MAX_HEADER_BYTES)

    def append(self, record: SampleRecord, parts: list[Encoded]) -> None:
        """Add a sample; its tensors' offsets are filled in here.

        Args:
            record: with one entry of `tensors` for each part, in the same order, checksums included. `has_room_for` it.
        """
        self.place(record)
        self.write(parts)

    def place(self, record: SampleRecord) -> None:
        """Do the part of `append` that needs no disk: say where the sample's bytes go. `write` must follow, in the same
        order, perhaps in another thread while the next samples get their places.
        """
        self._header_bytes += header_cost(record)
        self._reserve_for(sum(entry.num_bytes for entry in record.tensors))
        entries = []
        for entry in record.tensors:
            entries.append(
                TensorEntry(
                    entry.name, entry.codec, entry.dtype, entry.shape, self.data_bytes, entry.num_bytes, entry.checksum
                )
            )
            self.data_bytes += entry.num_bytes + pad_bytes(entry.num_bytes)
        self.samples.append(
            SampleRecord(
                key=record.key,
                source=record.source,
                num_tokens=record.num_tokens,
                num_learned=record.num_learned,
                attempts=record.attempts,
                tensors=entries,
                errors=record.errors,
            )
        )

    def write(self, parts: list[Encoded]) -> None:
        """Write the bytes of the first sample that has a place and no bytes yet."""
        if self._fd is None and self._reserve is not None:
            self._begin_file(self._reserve)
        for part in parts:
            num_bytes = memoryview(part.data).nbytes
            self._put(part.data, num_bytes)
            self._put(bytes(pad_bytes(num_bytes)), pad_bytes(num_bytes))

    def finish(self) -> tuple[ShardHeader, int]:
        """Write the header, make the bytes durable, give the file its name.

        Returns:
            The header as a reader would see it, and its size.
        """
        header = encode_header(self.number, self._manifest, self.samples, self._reserve)
        if self._fd is None:
            self._fd = self._fs.create(self._partial)
            self._fs.write(self._fd, header + b"".join(self._buffer))
        else:
            if self._past_cache is not None:
                self._past_cache.end()
            self._fs.write_at(self._fd, header, 0)
        self._fs.sync(self._fd)
        self._close()
        self._fs.rename(self._partial, self._path)
        return decode_header(header, len(header) + self.data_bytes, self._path.name), len(header)

    def discard(self) -> None:
        """Throw the unfinished shard away."""
        self._close()
        self._buffer.clear()
        self._fs.remove(self._partial)

    def _reserve_for(self, num_bytes: int) -> None:
        """Go over from memory to the file before the buffer gets too large."""
        if self._reserve is not None or self.data_bytes + num_bytes <= BUFFER_BYTES:
            return
        seen = max(self.data_bytes + num_bytes, 1)
        scale = max(1.25 * self._expected_bytes / seen, 1.0)
        wanted = max(self._header_bytes, min(int(self._header_bytes * scale), MAX_RESERVE_BYTES))
        self._reserve = wanted + (-wanted % ALIGNMENT)

    def _begin_file(self, reserve: int) -> None:
        self._fd = self._fs.create(self._partial)
        if self._direct:
            self._past_cache = PastCache(self._fs, self._fd)
        self._append(b" " * reserve)
        if self._buffer:
            self._append(b"".join(self._buffer))
            self._buffer.clear()

    def _put(self, data: Any, num_bytes: int) -> None:
        if num_bytes == 0:
            return
        if self._fd is None:
            self._buffer.append(memoryview(data).cast("B").tobytes())
        else:
            self._append(data)

    def _append(self, data: Any) -> None:
        assert self._fd is not None
        if self._past_cache is not None:
            self._past_cache.write(data)
        else:
            self._fs.write(self._fd, data)

    def _close(self) -> None:
        if self._fd is not None:
            fd, self._fd, self._past_cache = self._fd, None, None
            self._fs.close(fd)
