"""What the patch's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """Give a folder in memory: thousands of fsyncs would wait for the disk of the machine."""
    with TemporaryDirectory(dir="/dev/shm", prefix="test-hsdump-patch-") as folder:  # not hsdump-*: those are spools
        yield Path(folder)
