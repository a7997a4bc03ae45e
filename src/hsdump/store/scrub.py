"""Read every byte of a store, say which samples are damaged, and save the others.

`hsdump verify` also looks at the numbers; this only proves that the bytes are those that were committed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from hsdump.errors import StoreCorrupt
from hsdump.store.format import shard_name
from hsdump.store.index import Event, IndexedSample, IndexedShard
from hsdump.store.options import WriterOptions
from hsdump.store.reader import Store
from hsdump.store.shard_reader import damaged_pads, damaged_tensors, read_header
from hsdump.store.writer import StoreWriter

Progress = Callable[[int, int], None]
"""Called with samples and bytes done since the last call."""


class DamagedSample(msgspec.Struct, frozen=True, kw_only=True):
    """A sample that cannot be read as it was committed."""

    key: str
    source: str
    shard: str
    tensors: list[str]
    """Empty when the whole shard is gone."""


class DamagedShard(msgspec.Struct, frozen=True, kw_only=True):
    """A shard that is not as it was committed, and what of it is lost."""

    number: int
    problem: str
    samples: list[DamagedSample]
    sound: int
    """Samples in it whose bytes all hold."""


class ScrubReport(msgspec.Struct, kw_only=True):
    """What a scrub found and did."""

    store: str
    exit_code: int = 0
    """0 sound, 1 damage was found and repaired, 2 damage is there."""

    shards: int = 0
    samples: int = 0
    num_bytes: int = 0
    damaged: list[DamagedShard] = []
    recovered: list[Event] = []
    """What opening for the repair put in order."""

    repaired: bool = False
    missing: list[str] = []
    """Keys that the repair took out; the next extract captures them again."""


def scrub(path: Path, progress: Progress | None = None, *, threads: int | None = None) -> ScrubReport:
    """Prove every shard. Changes nothing.

    Raises:
        StoreError: no store, or its manifest or index are damaged (repair makes them again).
    """
    with Store(path) as store:
        report = ScrubReport(store=store.name)
        for shard, rows, found in _scrub_all(store, threads):
            report.shards += 1
            report.num_bytes += shard.num_bytes
            report.samples += rows
            if found is not None:
                report.damaged.append(found)
            if progress:
                progress(rows, shard.num_bytes)
    report.exit_code = 2 if report.damaged else 0
    return report


def repair(path: Path, progress: Progress | None = None, *, options: WriterOptions | None = None) -> ScrubReport:
    """Recover the store, scrub it, and write each damaged shard's sound samples into a new shard.

    The damaged file goes to quarantine; nothing is deleted.

    Raises:
        StoreBusy, StoreError: the store cannot be opened for writing.
    """
    with StoreWriter.reopen(path, options=options) as writer:
        report = scrub(path, progress)
        report.recovered = writer.recovered
        for found in report.damaged:
            report.missing += replace_with_sound(writer, found)
        lost = [
            event.subject
            for event in writer.recovered
            # A repair that died had perhaps saved it in a new shard, which was adopted since.
            if event.kind == "sample-lost" and not writer.is_committed(event.subject)
        ]
    report.missing = lost + report.missing
    report.repaired = bool(report.damaged or report.recovered)
    report.exit_code = 1 if report.repaired else 0
    return report


def replace_with_sound(writer: StoreWriter, found: DamagedShard) -> list[str]:
    """Save what holds of a damaged shard; gives the keys that are lost."""
    lost = {sample.key for sample in found.samples}
    with Store(writer.path) as store:
        keep = [row for row in store.rows_of(found.number) if row.record.key not in lost]
        parts = [(row.record, store.proved_parts(row)) for row in keep]
        event = Event(kind="shard-repaired", subject=shard_name(found.number), detail=found.problem)
        return writer.replace_shard(found.number, parts, event)


def _scrub_all(store: Store, threads: int | None) -> Iterator[tuple[IndexedShard, int, DamagedShard | None]]:
    """Give each shard with the number of its samples and what is wrong with it."""

    def look(shard: IndexedShard) -> tuple[IndexedShard, int, DamagedShard | None]:
        rows = store.rows_of(shard.number)
        return shard, len(rows), _scrub_shard(store, shard, rows)

    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0)), "hsdump-scrub") as pool:
        yield from pool.map(look, store.shards())


def _scrub_shard(store: Store, shard: IndexedShard, rows: list[IndexedSample]) -> DamagedShard | None:
    with store.shard_file(shard.number) as path:
        return _scrub_file(store, shard, rows, path)


def _scrub_file(store: Store, shard: IndexedShard, rows: list[IndexedSample], path: Path) -> DamagedShard | None:
    if not path.exists():
        return _all_lost(shard, rows, "its file is gone")
    if path.stat().st_size != shard.num_bytes:
        return _all_lost(shard, rows, f"it has {path.stat().st_size} bytes instead of {shard.num_bytes}")
    problem = _header_problem(store, shard, path)
    with path.open("rb", buffering=0) as file:
        samples = [
            DamagedSample(key=row.record.key, source=row.record.source, shard=path.name, tensors=tensors)
            for row in rows
            if (tensors := damaged_tensors(file.fileno(), row.record))
        ]
    if samples and not problem:
        problem = f"{len(samples)} of {len(rows)} samples have wrong bytes"
    if not problem:
        return None
    return DamagedShard(number=shard.number, problem=problem, samples=samples, sound=len(rows) - len(samples))


def _header_problem(store: Store, shard: IndexedShard, path: Path) -> str | None:
    """The index knows every place and checksum, so a damaged header alone costs no sample."""
    try:
        header, _ = read_header(path)
    except StoreCorrupt as error:
        return error.what
    if header.checksum != shard.checksum or header.manifest_digest != store.manifest.digest:
        return "it is not the shard that was committed"
    pads = damaged_pads(path, header)
    return f"padding at byte {pads[0]} is not zero" if pads else None


def _all_lost(shard: IndexedShard, rows: list[IndexedSample], problem: str) -> DamagedShard:
    name = shard_name(shard.number)
    samples = [DamagedSample(key=row.record.key, source=row.record.source, shard=name, tensors=[]) for row in rows]
    return DamagedShard(number=shard.number, problem=problem, samples=samples, sound=0)
