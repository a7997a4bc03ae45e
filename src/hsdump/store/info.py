"""What a store holds, in numbers and in words."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from hsdump.store.format import QUARANTINE_FOLDER
from hsdump.store.index import Event
from hsdump.store.manifest import Manifest
from hsdump.store.reader import Store


class StoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A store at a glance."""

    store: str
    manifest: Manifest
    samples: int
    tokens: int
    learned_tokens: int
    longest: int
    """Tokens of the longest sample."""

    shards: int
    shard_bytes: int
    bytes_per_token: float
    """On disk, everything included."""

    raw_bytes_per_token: int
    """As the states leave the model."""

    coverage: float | None
    """Samples over samples and failures; None for an empty store."""

    failures: dict[str, int]
    skips: dict[str, int]
    events: list[Event]
    quarantined: list[str]


def store_info(path: Path) -> StoreInfo:
    """Sum a store up from its index, without touching a shard.

    Raises:
        StoreError, StoreCorrupt: no store, or its manifest or index are damaged.
    """
    with Store(path) as store:
        samples, tokens, learned = store.totals()
        shards = store.shards()
        num_bytes = sum(shard.num_bytes for shard in shards)
        failures = store.failures()
        tried = samples + len(failures)
        folder = store.path / QUARANTINE_FOLDER
        return StoreInfo(
            store=store.name,
            manifest=store.manifest,
            samples=samples,
            tokens=tokens,
            learned_tokens=learned,
            longest=store.longest(),
            shards=len(shards),
            shard_bytes=num_bytes,
            bytes_per_token=round(num_bytes / tokens, 1) if tokens else 0.0,
            raw_bytes_per_token=store.manifest.shape.bytes_per_token,
            coverage=samples / tried if tried else None,
            failures=dict(Counter(failure.reason for failure in failures.values())),
            skips=dict(store.skips()),
            events=store.events(),
            quarantined=sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else [],
        )
