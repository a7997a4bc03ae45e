"""Writes a shard past the page cache: half of the processor time, and what else the host keeps there stays.

The kernel's copy into the cache takes 1 to 2 s of processor time a gigabyte on a small virtual machine, and its
write-back some more in threads of its own; 900 GiB that go through it also push out everything that a server beside it
has there. Instead bytes are collected in aligned memory and handed to the disk from there.
"""

from __future__ import annotations

import errno
import mmap
from typing import Any, final

import numpy as np

from hsdump.store.fs import Fs

BLOCK_BYTES = 8 << 20
"""Written at a time, at multiples of it: every disk's own blocks divide it. Large enough for one write to keep a disk
busy, small enough for several shards at a time."""

REFUSED = {errno.EINVAL, errno.EOPNOTSUPP}
"""What file systems say that take the flag and have no such writes."""


@final
class PastCache:
    """Appends to an empty file. Bytes are on their way to the disk only a block at a time; `end` writes the rest.

    Where the file system has no such writes (tmpfs before Linux 6.6, some network ones) they go through the cache.
    """

    def __init__(self, fs: Fs, fd: int) -> None:
        self._fs, self._fd = fs, fd
        self._memory = mmap.mmap(-1, BLOCK_BYTES)  # begins at a page, as the disk wants it
        self._block = np.frombuffer(self._memory, dtype=np.uint8)
        self._filled = self._written = 0
        self._direct = fs.set_direct(fd, on=True)

    def write(self, data: Any) -> None:
        """Append all bytes; they are not needed any more on return."""
        left = np.frombuffer(memoryview(data).cast("B"), dtype=np.uint8)
        while len(left):
            taken = min(BLOCK_BYTES - self._filled, len(left))
            np.copyto(self._block[self._filled : self._filled + taken], left[:taken])  # without the interpreter's lock
            left = left[taken:]
            self._filled += taken
            if self._filled == BLOCK_BYTES:
                self._flush()

    def end(self) -> None:
        """Write what is left. The file is an ordinary one from here on, its bytes not durable yet."""
        self._through_cache()
        if self._filled:
            self._flush()

    def _flush(self) -> None:
        block = memoryview(self._memory)[: self._filled]
        try:
            self._fs.write_at(self._fd, block, self._written)
        except OSError as error:
            if error.errno not in REFUSED or not self._direct:
                raise
            self._through_cache()
            self._fs.write_at(self._fd, block, self._written)  # at the same place, whatever was written of it
        self._written += self._filled
        self._filled = 0

    def _through_cache(self) -> None:
        if self._direct:
            self._fs.set_direct(self._fd, on=False)
            self._direct = False
