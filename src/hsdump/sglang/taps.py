"""Which tap a capturing process gets: files on a CPU, a ring on an accelerator, or what the user asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hsdump.capture.ring_tap import RingTap
from hsdump.capture.staging import staging_bytes
from hsdump.capture.tap import Tap
from hsdump.schema import StateShape
from hsdump.sglang.facts import RunnerFacts
from hsdump.spool.names import (
    DEFAULT_SPOOL_BYTES,
    ENV_HAND_OVER,
    ENV_SHARE_RANKS,
    ENV_SPOOL_BYTES,
    ENV_STAGING_BYTES,
    SpoolPaths,
)
from hsdump.spool.ring import RingWriter
from hsdump.spool.writer import SpoolWriter

DEFAULT_STAGING_BYTES = 380_000_000
"""Of each copying process's device. Enough for a pass of 8,192 rows of 46 kB; of a wider one some rows are copied from
where they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TapSettings:
    """What the environment of the server says about the hand-over."""

    hand_over: str
    """`files` or `ring`."""

    spool_bytes: int
    """Of all entries, or of all rings of this host together."""

    staging_bytes: int
    """At most, of each copying process's device."""

    copying_ranks: int
    """Tensor-parallel ranks that copy, each its share of the rows."""


def read_settings(device: str, tp_size: int) -> TapSettings:
    """Read the environment that `hsdump serve` sets.

    Raises:
        ValueError: a value that means nothing.
    """
    asked = os.environ.get(ENV_HAND_OVER, "auto")
    if asked not in ("auto", "files", "ring"):
        raise ValueError(f"{ENV_HAND_OVER}={asked} is none of auto, files, ring")
    hand_over = asked if asked != "auto" else "files" if device == "cpu" else "ring"
    shared = hand_over == "ring" and os.environ.get(ENV_SHARE_RANKS, "1") == "1"
    return TapSettings(
        hand_over=hand_over,
        spool_bytes=int(os.environ.get(ENV_SPOOL_BYTES, DEFAULT_SPOOL_BYTES)),
        staging_bytes=int(os.environ.get(ENV_STAGING_BYTES, DEFAULT_STAGING_BYTES)),
        copying_ranks=tp_size if shared else 1,
    )


def make_tap(
    root: Path, shape: StateShape, facts: RunnerFacts, settings: TapSettings
) -> tuple[Tap | RingTap, str | None]:
    """Build the tap, and the ring that it copies into.

    Returns:
        The tap and the ring's file name, or None without a ring.
    """
    spool = SpoolWriter(root, shape, max_bytes=settings.spool_bytes)
    if settings.hand_over == "files":
        return Tap(spool), None
    path = SpoolPaths(root).ring(os.getpid())
    ring = RingWriter(path, shape, settings.spool_bytes // (settings.copying_ranks * facts.dp_size))
    share = (facts.tp_rank, settings.copying_ranks)
    rows = -(-facts.rows_per_pass // settings.copying_ranks)
    staging = staging_bytes(rows, shape.bytes_per_token + 8, settings.staging_bytes)
    try:
        return RingTap(ring, spool, device=facts.device, staging=staging, share=share), path.name
    except BaseException:
        path.unlink(missing_ok=True)  # gigabytes of shared memory, which would stay until this server ends
        raise
