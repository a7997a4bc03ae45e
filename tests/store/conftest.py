"""How long the random tests go on: `dev` while working, `ci` where CI is set, `nightly` with HSDUMP_PROFILE=nightly.

HSDUMP_CASES=5000 sets the number, to share a long run among processes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

CASES = {"dev": 100, "ci": 2000, "nightly": 20_000}
PROFILE = os.environ.get("HSDUMP_PROFILE") or ("ci" if os.environ.get("CI") else "dev")

MACHINE_SETTINGS = settings(
    max_examples=int(os.environ.get("HSDUMP_CASES", CASES[PROFILE])),
    stateful_step_count=12,
    deadline=None,  # a disk's speed is no property of the store
    derandomize=PROFILE == "ci",
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
"""Of the state machine alone: a profile loaded here would be everybody's."""


def memory_folder() -> Path:
    """Give a fresh folder, in memory where the system has that: thousands of cases sync all the time."""
    shm = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="hsdump-test-", dir=shm if os.access(shm, os.W_OK) else None))


@pytest.fixture
def fast_folder() -> Iterator[Path]:
    import shutil

    folder = memory_folder()
    yield folder
    shutil.rmtree(folder)
