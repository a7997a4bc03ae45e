"""Go through a whole store and say what is wrong with it. Memory does not grow with the store."""

from __future__ import annotations

import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hsdump.errors import StoreCorrupt, UsageError
from hsdump.locks import is_held
from hsdump.store.format import INDEX_NAME, INPUT_IDS, LOCK_NAME, SampleRecord, ShardHeader, shard_name, shard_path
from hsdump.store.index import IndexedSample, IndexedShard
from hsdump.store.manifest import Manifest
from hsdump.store.reader import Store
from hsdump.store.recovery import list_shards
from hsdump.store.shard_reader import damaged_pads, read_header
from hsdump.verify.findings import Collector, Finding, Report, Sampled
from hsdump.verify.grid import GridEvidence
from hsdump.verify.norms import SAMPLE_FACTOR, NormHistogram
from hsdump.verify.proof_file import proof_standing
from hsdump.verify.sample_checks import SampleChecker, SampleResult, batches

BATCH_BYTES = 64 << 20
BATCH_SAMPLES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions:
    """How much of a store to look at, and with what."""

    sample: int | None = None
    """Look at so many samples only, chosen by `seed`; shards' headers are all checked."""

    seed: int = 0
    threads: int = field(default_factory=lambda: min(8, len(os.sched_getaffinity(0))))


Progress = Callable[[int, int], None]
"""Called with samples and bytes done since the last call."""


def verify_store(path: Path, options: VerifyOptions | None = None, progress: Progress | None = None) -> Report:
    """Check a store's bytes, numbers and agreement with itself. Changes nothing, and a writer may be at work.

    Raises:
        StoreError: there is no store.
        UsageError: some of its shards are at a URL only.
    """
    started = time.monotonic()
    collector = Collector()
    report = Report(store=str(path))
    try:
        store = Store(path)
    except StoreCorrupt as error:
        collector.add(Finding(check="index" if INDEX_NAME in error.what else "manifest", detail=error.what))
    else:
        with store:
            if not store.is_whole:
                what = f"verify reads files, and some shards of {path} are only at {store.url}"
                raise UsageError(what, f"bring them here: hsdump store merge {path} --out FOLDER")
            _Run(store, options or VerifyOptions(), progress or _nobody, collector, report).run()
    report.findings, report.counts = collector.kept, dict(collector.counts)
    report.verdict, report.exit_code = collector.verdict()
    report.seconds = round(time.monotonic() - started, 3)
    return report


def _nobody(_samples: int, _num_bytes: int) -> None:
    return None


class _Run:
    """One verification."""

    def __init__(
        self, store: Store, options: VerifyOptions, progress: Progress, collector: Collector, report: Report
    ) -> None:
        self._store, self._options, self._progress = store, options, progress
        self._collector, self._report = collector, report
        self._manifest: Manifest = store.manifest
        self._histograms = {name: NormHistogram() for name in self._manifest.shape.names}
        self._grid = GridEvidence()
        self._float16: list[tuple[str, str]] = []
        self._medians: dict[str, list[tuple[str, float]]] = {}
        self._first_with_tokens: dict[str, str] = {}

    def run(self) -> None:
        # The folder is listed before the index is read, so that a commit in between is no finding.
        on_disk = list_shards(self._store.path)
        writer_at_work = is_held(self._store.path / LOCK_NAME)
        self._store.refresh()
        if not (self._store.path / INDEX_NAME).exists() and on_disk:
            self._add("index-missing", f"{INDEX_NAME} is missing; the shards' headers were used in its place")
        shards = self._store.shards()
        if not len(self._store):
            self._add("no-samples", "the store holds no sample: there is nothing that could be right or wrong")
        if not writer_at_work:
            for number in sorted(on_disk.keys() - {shard.number for shard in shards}):
                detail = "the index does not know it; it is adopted when the store is opened for writing"
                self._add("shard-not-indexed", detail, shard=shard_name(number))
        whole = [shard for shard in shards if self._check_shard(shard)]
        self._check_samples(whole)
        self._compare_medians()
        self._check_float16()
        self._report.layers = [histogram.summary(name) for name, histogram in self._histograms.items()]
        self._report.failures = dict(Counter(failure.reason for failure in self._store.failures().values()))
        self._report.skips = dict(self._store.skips())
        self._report.proof = proof_standing(self._store)

    def _add(self, check: str, detail: str, *, shard: str | None = None, sample: str | None = None) -> None:
        self._collector.add(Finding(check=check, detail=detail, shard=shard, sample=sample))

    def _check_shard(self, shard: IndexedShard) -> bool:
        """Check a shard's length, header and pads, and that the index says the same; True if samples can be read."""
        path, name = shard_path(self._store.path, shard.number), shard_name(shard.number)
        try:
            header, _ = read_header(path)
        except FileNotFoundError:
            self._name_samples(shard, "shard-missing", "its shard is gone")
            return False
        except (StoreCorrupt, OSError) as error:
            detail = error.what if isinstance(error, StoreCorrupt) else str(error)
            self._name_samples(shard, "shard-damaged", detail)
            return path.exists() and path.stat().st_size == shard.num_bytes
        if header.checksum != shard.checksum or header.manifest_digest != self._manifest.digest:
            self._name_samples(shard, "shard-damaged", f"{name} is not the shard that was committed")
            return False
        for offset in damaged_pads(path, header):
            self._add("shard-damaged", f"padding at byte {offset} is not zero", shard=name)
        self._compare_with_index(shard, header)
        return True

    def _compare_with_index(self, shard: IndexedShard, header: ShardHeader) -> None:
        name = shard_name(shard.number)
        rows = {row.record.key: row.record for row in self._store.rows_of(shard.number)}
        records: dict[str, SampleRecord] = {record.key: record for record in header.samples}
        for key in rows.keys() - records.keys():
            self._add("shard-disagrees", "the index has it in a shard that does not", shard=name, sample=key)
        for key, record in records.items():
            if key in rows and rows[key] != record:
                self._add("shard-disagrees", "index and shard say different things of it", shard=name, sample=key)
            elif key not in rows and key not in self._store:
                self._add("shard-disagrees", "the shard has it, the index does not", shard=name, sample=key)

    def _name_samples(self, shard: IndexedShard, check: str, detail: str) -> None:
        for row in self._store.rows_of(shard.number):
            self._collector.add(
                Finding(
                    check=check,
                    detail=detail,
                    sample=row.record.key,
                    source=row.record.source,
                    shard=shard_name(shard.number),
                )
            )

    def _check_samples(self, shards: list[IndexedShard]) -> None:
        chosen = self._choose()
        pending: deque[Future[SampleResult]] = deque()
        with ThreadPoolExecutor(self._options.threads, "hsdump-verify") as pool:
            for number, batch in self._work(shards, chosen):
                pending.append(pool.submit(_check_batch, shard_path(self._store.path, number), self._manifest, batch))
                if len(pending) > 2 * self._options.threads:
                    self._take(pending.popleft().result())
            while pending:
                self._take(pending.popleft().result())

    def _choose(self) -> frozenset[int] | None:
        """Choose samples by their place, when not all are wanted."""
        total, wanted = len(self._store), self._options.sample
        if wanted is None or wanted >= total:
            return None
        self._report.sampled = Sampled(checked=wanted, of=total, seed=self._options.seed)
        order = random.Random(self._options.seed)  # noqa: S311 - which samples to look at is no secret
        return frozenset(self._store.position_of(place) for place in order.sample(range(total), wanted))

    def _work(
        self, shards: list[IndexedShard], chosen: frozenset[int] | None
    ) -> Iterator[tuple[int, list[IndexedSample]]]:
        for shard in shards:
            rows = self._store.rows_of(shard.number)
            for row in rows:
                self._check_duplicate(row)
            wanted = (row for row in rows if chosen is None or row.position in chosen)
            for batch in batches(wanted, BATCH_BYTES, BATCH_SAMPLES):
                yield shard.number, batch

    def _check_duplicate(self, row: IndexedSample) -> None:
        """The key is made of tokens and mask, so the same tokens can only come twice with another mask."""
        checksum = next((entry.checksum for entry in row.record.tensors if entry.name == INPUT_IDS), None)
        if checksum is None:
            return
        first = self._first_with_tokens.setdefault(checksum, row.record.key)
        if first != row.record.key:
            self._collector.add(
                Finding(
                    check="duplicate-tokens",
                    detail=f"the same tokens as sample {first}, under another loss mask",
                    sample=row.record.key,
                    source=row.record.source,
                )
            )

    def _take(self, result: SampleResult) -> None:
        for finding in result.findings:
            self._collector.add(finding)
        for name, histogram in result.histograms.items():
            self._histograms[name].merge(histogram)
        for name, medians in result.medians.items():
            self._medians.setdefault(name, []).extend(medians)
        self._grid.merge(result.grid)
        self._float16 += result.float16
        self._report.samples += result.samples
        self._report.tokens += result.tokens
        self._report.learned_tokens += result.learned_tokens
        self._report.bytes_read += result.bytes_read
        self._progress(result.samples, result.bytes_read)

    def _compare_medians(self) -> None:
        """A sample whose states are all far smaller or larger than everybody else's came from something else."""
        for name, pairs in self._medians.items():
            typical = float(np.median([median for _, median in pairs]))
            for key, median in pairs:
                if not typical / SAMPLE_FACTOR <= median <= typical * SAMPLE_FACTOR:
                    detail = f"median norm {median:.3g}, of all samples {typical:.3g}"
                    self._collector.add(Finding(check="norm-of-sample", detail=detail, sample=key, layer=name))

    def _check_float16(self) -> None:
        """Say that states were rounded to float16: once when all were, else for each sample that was."""
        detail = "bfloat16 states whose tiniest values all lie on float16's grid: rounded to float16 on their way"
        if self._grid.is_float16:
            self._add("float16-grid", f"all samples: {detail}")
            return
        for key, source in self._float16:
            self._collector.add(Finding(check="float16-grid", detail=detail, sample=key, source=source))


def _check_batch(path: Path, manifest: Manifest, rows: list[IndexedSample]) -> SampleResult:
    """Runs in a worker thread; numpy, hashing and reading all let go of the interpreter lock."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        checker = SampleChecker(manifest, fd)
        for row in rows:
            checker.check(row)
        return checker.result
    finally:
        os.close(fd)
