"""How a store is written: options of the writer, none of which a reader sees."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from hsdump.store.attach import RemoteOptions
from hsdump.store.fs import Fs


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterOptions:
    """How a store is written; none of it changes what a reader sees."""

    shard_bytes: int = 1 << 30
    """A shard that reached this size takes no further sample. One commit may hold several shards."""

    shards_at_once: int = 4
    """Shards that `begin_add` fills side by side at most, each in a thread of its own; one by one where the disk keeps
    up. `add` and `copy` fill one shard after the other in the thread that calls, whatever stands here.
    """

    direct: bool = False
    """Write large shards past the page cache; see `past_cache`."""

    codec_threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """States encoded at a time by a codec other than raw."""

    fs: Fs = field(default_factory=Fs)
    """Where disk operations go; tests break it."""

    remote: RemoteOptions = field(default_factory=RemoteOptions)
    """A URL that shards go to, for a store that is to have one. One that has it already goes on with it."""
