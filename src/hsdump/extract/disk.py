"""Stopping before the disk is full: the reserve is kept, and what is missing is said in bytes."""

from __future__ import annotations

import shutil
from pathlib import Path

from hsdump.errors import StoreError
from hsdump.extract.state import RunState

MARGIN_BYTES = 1 << 20
"""Index, write-ahead log and headers of what is not committed yet."""


class DiskFull(StoreError):
    """The disk has no room for the next sample. Everything before it is committed."""


class DiskGuard:
    """Looks at the disk before each sample. What is in flight is counted at its full size, whatever the codec makes of
    it: a commit that was begun must find its room.
    """

    def __init__(self, place: Path, reserve_bytes: int) -> None:
        self._place, self._reserve = place, reserve_bytes

    def free(self) -> int:
        return shutil.disk_usage(self._place).free

    def check(self, num_bytes: int, state: RunState) -> None:
        """Raises:
        DiskFull: this sample and those in flight would leave less than the reserve.
        """
        free = self.free()
        needed = state.in_flight_bytes + num_bytes + MARGIN_BYTES + self._reserve
        if free >= needed:
            return
        left, rest = state.to_do, ""
        if left and state.committed:
            about = left * state.state_bytes // state.committed
            rest = f"; the {left} samples that are left take about {about:,} bytes as raw"
        raise DiskFull(
            f"the disk of {self._place} has {free:,} bytes free, {needed:,} are needed for the next sample, those in "
            f"flight and the reserve of {self._reserve:,}: {needed - free:,} are missing{rest}",
            "make room, or lower --disk-reserve, and run the same command again: it goes on where it stopped",
        )
