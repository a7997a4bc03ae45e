"""What a capture will need, before it starts: tokens, bytes by codec, disk, spool and time, and whether it fits.

Pure arithmetic over a census of the input; the exact rules of admission (`extract.driver`) are used, not guesses.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hsdump.prompts import Skip
from hsdump.samples import TokenSample
from hsdump.schema import DTYPE_BYTES, StateShape
from hsdump.spool.entry import entry_bytes
from hsdump.spool.names import SHARED_MEMORY

BLOSC2_SHARE = 0.70
"""Of raw. Measured on real bfloat16 states: 0.6958 (benchmarks/results/store.md); it depends on the model."""

SPOOL_SHARE = 0.9
"""Of a server's spool limit, the part that one client fills (see `extract.lanes`)."""

ROW_BYTES = 8 + 1
"""Token id and loss mask of one token in a shard."""

SAMPLE_BYTES = 2048
"""Headers, index row and padding of one sample, rounded up."""


@dataclass(kw_only=True, slots=True)
class Census:
    """What an input holds. Grows with each sample; small, however many there are."""

    samples: int = 0
    tokens: int = 0
    longest: int = 0
    too_long: int = 0
    """Samples over the context: they are skipped and counted by `extract`, never cut."""

    buckets: Counter[int] = field(default_factory=Counter)
    """Upper bound (a power of two) -> samples of that many tokens or fewer, and more than half of it."""

    skips: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    """Skips that are damage, not policy."""

    def add(self, item: TokenSample | Skip) -> None:
        if isinstance(item, Skip):
            self.skips[item.reason] += 1
            self.too_long += item.reason == "too-long"
            self.lost += item.lost
        else:
            self.add_length(len(item.input_ids))

    def add_length(self, num_tokens: int) -> None:
        self.samples += 1
        self.tokens += num_tokens
        self.longest = max(self.longest, num_tokens)
        self.buckets[_bucket(num_tokens)] += 1

    @classmethod
    def of(cls, items: Iterable[TokenSample | Skip]) -> Census:
        census = cls()
        for item in items:
            census.add(item)
        return census

    @classmethod
    def given(cls, samples: int, tokens: int) -> Census:
        """Stand for an input of which only two numbers are known; its longest sample is taken to be the mean."""
        mean = math.ceil(tokens / samples)
        return cls(samples=samples, tokens=tokens, longest=mean, buckets=Counter({_bucket(mean): samples}))


def _bucket(num_tokens: int) -> int:
    return 1 << math.ceil(math.log2(max(num_tokens, 1)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Where the data will go."""

    disk_free: int | None
    """Bytes free for the store; None when no place was named."""

    disk_reserve: int
    """Bytes that `extract` leaves free."""

    shm_free: int
    """Bytes free in shared memory on this host."""

    context_length: int | None = None
    spool_bytes: int | None = None
    """The server's limit, when a server was asked."""

    tokens_per_s: float | None = None
    """Prefill rate, given or measured."""

    concurrency: int = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a capture needs, and whether there is room for it."""

    samples: int
    tokens: int
    longest: int
    over_context: int
    histogram: dict[str, int]
    """`<= 512` -> samples."""

    skips: dict[str, int]
    bytes_per_token: int
    bytes_raw: int
    """States alone, as they leave the model."""

    bytes_by_codec: dict[str, int]
    """Store on disk with token ids, masks and headers. blosc2 by a measured share, the others exactly."""

    codec: str
    disk_needed: int
    """For the codec asked for, with the reserve that `extract` keeps free."""

    disk_free: int | None
    spool_minimum: int
    """Smallest `hsdump serve --spool-bytes` that takes the longest sample."""

    spool_recommended: int
    """Room for all requests that are in flight at a time."""

    shm_free: int
    tokens_per_s: float | None
    seconds: float | None
    fits: bool
    problems: list[str]
    """What does not fit, each with what to change."""


def store_bytes(codec: str, shape: StateShape, census: Census) -> int:
    """Give the bytes of a store that holds these samples."""
    raw = census.tokens * shape.bytes_per_token
    states = len(shape.names)
    sizes = {
        "raw": raw,
        "blosc2": math.ceil(raw * BLOSC2_SHARE),
        # A byte an element and a float32 scale a token and state.
        "fp8": census.tokens * states * (shape.row_bytes // DTYPE_BYTES[shape.dtype] + 4),
    }
    return sizes[codec] + census.tokens * ROW_BYTES + census.samples * SAMPLE_BYTES


def estimate(census: Census, shape: StateShape, codec: str, room: Room) -> Estimate:
    """Put numbers and verdict together."""
    by_codec = {name: store_bytes(name, shape, census) for name in ("raw", "blosc2", "fp8")}
    largest = entry_bytes(shape, census.longest) if census.longest else 0
    mean = entry_bytes(shape, math.ceil(census.tokens / census.samples)) if census.samples else 0
    minimum = math.ceil(largest / SPOOL_SHARE)
    found = Estimate(
        samples=census.samples,
        tokens=census.tokens,
        longest=census.longest,
        over_context=census.too_long,
        histogram={f"<= {bound}": census.buckets[bound] for bound in sorted(census.buckets)},
        skips=dict(sorted(census.skips.items())),
        bytes_per_token=shape.bytes_per_token,
        bytes_raw=census.tokens * shape.bytes_per_token,
        bytes_by_codec=by_codec,
        codec=codec,
        disk_needed=by_codec[codec] + room.disk_reserve,
        disk_free=room.disk_free,
        spool_minimum=minimum,
        spool_recommended=max(minimum, math.ceil(room.concurrency * mean / SPOOL_SHARE)),
        shm_free=room.shm_free,
        tokens_per_s=room.tokens_per_s,
        seconds=census.tokens / room.tokens_per_s if room.tokens_per_s else None,
        fits=True,
        problems=[],
    )
    found.problems.extend(_problems(found, room, census))
    object.__setattr__(found, "fits", not found.problems)
    return found


def _problems(found: Estimate, room: Room, census: Census) -> Iterable[str]:
    if not found.samples:
        yield "the input gives no sample: look at the reasons with hsdump prepare --show 3"
    if census.lost:
        yield f"{census.lost} rows are damaged or not understood: look at them with hsdump prepare"
    if room.disk_free is not None and found.disk_needed > room.disk_free:
        smaller = [name for name, size in found.bytes_by_codec.items() if size + room.disk_reserve <= room.disk_free]
        lossless = " (lossless)" if "blosc2" in smaller else ""
        remedy = f"use --codec {smaller[0]}{lossless}, or " if smaller else ""
        missing = found.disk_needed - room.disk_free
        yield (
            f"the disk lacks {missing:,} bytes: {found.disk_needed:,} needed, {room.disk_free:,} free; {remedy}"
            "name a larger disk with --out, capture fewer --layers, or fewer samples"
        )
    limit = room.shm_free if room.spool_bytes is None else room.spool_bytes
    if found.spool_minimum > limit:
        where = "shared memory has free" if room.spool_bytes is None else "the server's spool takes"
        yield (
            f"the longest sample ({found.longest:,} tokens) needs a spool of {found.spool_minimum:,} bytes, {where} "
            f"{limit:,}; start the server with a larger --spool-bytes, give /dev/shm more, or lower --max-tokens"
        )


def free_bytes(place: Path) -> int:
    """Give the free bytes of the disk on which a folder lies or will lie."""
    while not place.exists():
        place = place.absolute().parent
    return shutil.disk_usage(place).free


def shm_free_bytes() -> int:
    """Give the free bytes of shared memory on this host, 0 where there is none."""
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
