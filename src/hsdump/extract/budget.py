"""Admission by bytes: what is in flight may never fill the spool."""

from __future__ import annotations

import asyncio


class ByteBudget:
    """A counting semaphore over bytes, first come first served."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._changed = asyncio.Condition()

    async def acquire(self, num_bytes: int) -> None:
        """Wait until so many bytes are free. More than the whole budget can never be granted: check before."""
        assert num_bytes <= self.limit
        async with self._changed:
            await self._changed.wait_for(lambda: self.used + num_bytes <= self.limit)
            self.used += num_bytes

    async def release(self, num_bytes: int) -> None:
        async with self._changed:
            self.used -= num_bytes
            self._changed.notify_all()
