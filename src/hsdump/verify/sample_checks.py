"""Everything that can be told about one sample from its own bytes.

Letters: S = tokens of one sample, H = hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsdump.arrays import StateArray, xxh3
from hsdump.errors import StoreCorrupt
from hsdump.samples import sample_key
from hsdump.store.codecs import decode_state
from hsdump.store.format import INPUT_IDS, LOSS_MASK, SampleRecord, TensorEntry, shard_name
from hsdump.store.index import IndexedSample
from hsdump.store.manifest import Manifest
from hsdump.verify.findings import Finding
from hsdump.verify.grid import GridEvidence
from hsdump.verify.norms import NormHistogram, repeated_rows, scan_rows, stand_out

READ_BYTES = 1 << 30
"""The kernel gives at most 2 GiB at a time."""


@dataclass(kw_only=True)
class SampleResult:
    """What checking some samples gave; small, whatever their size."""

    findings: list[Finding] = field(default_factory=list)
    histograms: dict[str, NormHistogram] = field(default_factory=dict)
    medians: dict[str, list[tuple[str, float]]] = field(default_factory=dict)
    """State to (sample, median norm)."""

    grid: GridEvidence = field(default_factory=GridEvidence)
    float16: list[tuple[str, str]] = field(default_factory=list)
    """Samples that were float16 once: key and source."""

    samples: int = 0
    tokens: int = 0
    learned_tokens: int = 0
    bytes_read: int = 0


class SampleChecker:
    """Checks samples of one shard, one state in memory at a time."""

    def __init__(self, manifest: Manifest, fd: int) -> None:
        """Args:
        fd: the shard, open for reading.
        """
        self._manifest, self._shape, self._fd = manifest, manifest.shape, fd
        self.result = SampleResult(histograms={name: NormHistogram() for name in self._shape.names})

    def check(self, row: IndexedSample) -> None:
        """Look at all bytes of a sample."""
        record = row.record
        found = _Found(row, self.result.findings)
        self.result.samples += 1
        self.result.tokens += record.num_tokens
        self.result.learned_tokens += record.num_learned
        data = {
            entry.name: self._read(entry, found) for entry in record.tensors if entry.name in {INPUT_IDS, LOSS_MASK}
        }
        input_ids = _array(data.get(INPUT_IDS), "<i8")
        loss_mask = _array(data.get(LOSS_MASK), np.dtype(np.uint8))
        self._check_tokens(record, input_ids, loss_mask, found)
        grid = GridEvidence()
        for name in self._shape.names:
            entries = [entry for entry in record.tensors if entry.name == name or entry.name.startswith(name + ".")]
            state_SH = self._state(name, entries, record.num_tokens, found)
            if state_SH is not None:
                self._check_state(name, state_SH, input_ids, found)
                if self._shape.dtype == "bfloat16" and entries[0].codec != "fp8":
                    grid.add(name, state_SH)
        self.result.grid.merge(grid)
        if grid.is_float16:
            self.result.float16.append((record.key, record.source))
        _check_equal_layers(record, self._shape.names, found)

    def _read(self, entry: TensorEntry, found: _Found) -> bytearray:
        data = bytearray(entry.num_bytes)
        view, done = memoryview(data), 0
        while done < entry.num_bytes:
            size = os.preadv(self._fd, [view[done : done + READ_BYTES]], entry.offset + done)
            if size == 0:
                break
            done += size
        self.result.bytes_read += done
        if xxh3(data) != entry.checksum:
            found.add("checksum", "its bytes are not those that were committed", layer=entry.name)
        return data

    def _state(self, name: str, entries: list[TensorEntry], num_tokens: int, found: _Found) -> StateArray | None:
        if not entries:
            found.add("shape", "the sample has no such state", layer=name)
            return None
        parts = {entry.name[len(name) :]: self._read(entry, found) for entry in entries}
        try:
            return decode_state(entries[0].codec, parts, num_tokens, self._shape)
        except StoreCorrupt as error:
            found.add("codec", error.what, layer=name)
        except ValueError:
            held = {entry.name: f"{entry.dtype} {entry.shape}" for entry in entries}
            want = f"{self._shape.dtype} [{num_tokens}, {self._shape.hidden_size}]"
            found.add("shape", f"{held} instead of {want}", layer=name)
        return None

    def _check_tokens(
        self, record: SampleRecord, input_ids: NDArray[np.int64], loss_mask: NDArray[np.uint8], found: _Found
    ) -> None:
        if not len(input_ids) == len(loss_mask) == record.num_tokens or not record.num_tokens:
            what = f"{len(input_ids)} token ids, {len(loss_mask)} mask values, {record.num_tokens} tokens in the index"
            found.add("shape", what, layer=INPUT_IDS)
            return
        outside = np.flatnonzero((input_ids < 0) | (input_ids >= self._manifest.vocab_size))
        if len(outside):
            what = f"token id {input_ids[outside[0]]} is outside the vocabulary of {self._manifest.vocab_size}"
            found.add("token-id", what, layer=INPUT_IDS, rows=outside)
        wrong = np.flatnonzero(loss_mask > 1)
        if len(wrong):
            found.add("mask-value", f"the loss mask holds {loss_mask[wrong[0]]}", layer=LOSS_MASK, rows=wrong)
        elif not loss_mask.any():
            found.add("mask-empty", "no token is learned from", layer=LOSS_MASK)
        if sample_key(input_ids, loss_mask) != record.key:
            found.add("key", "tokens and mask are not those that the key was made of")
        if record.num_tokens > self._manifest.max_tokens:
            found.add("too-long", f"{record.num_tokens} tokens, the capture allowed {self._manifest.max_tokens}")

    def _check_state(self, name: str, state_SH: StateArray, input_ids: NDArray[np.int64], found: _Found) -> None:
        scan = scan_rows(state_SH, self._shape.dtype)
        self.result.histograms[name].add(scan.norms)
        if scan.not_finite:
            found.add("not-finite", "NaN or infinity", layer=name, rows=scan.not_finite)
        zero = np.flatnonzero(scan.norms == 0)
        if len(zero):
            found.add("zero-row", "all values are zero", layer=name, rows=zero)
        if scan.constant:
            found.add("constant-row", "all values are the same", layer=name, rows=scan.constant)
        if len(input_ids) == len(scan.norms):
            repeated = repeated_rows(state_SH, scan.norms, input_ids)
            if repeated:
                found.add("repeated-row", "equals the row before, of another token", layer=name, rows=repeated)
        median, low, high = stand_out(scan.norms)
        if low:
            found.add("norm-drop", f"norm {scan.norms[low[0]]:.3g}, the median is {median:.3g}", layer=name, rows=low)
        if high:
            found.add("norm-peak", f"norm {scan.norms[high[0]]:.3g}, the median is {median:.3g}", layer=name, rows=high)
        if np.isfinite(median):
            self.result.medians.setdefault(name, []).append((found.row.record.key, median))


class _Found:
    """Adds what every finding of one sample shares."""

    def __init__(self, row: IndexedSample, findings: list[Finding]) -> None:
        self.row, self._findings = row, findings

    def add(self, check: str, detail: str, *, layer: str | None = None, rows: Any = None) -> None:
        record = self.row.record
        self._findings.append(
            Finding(
                check=check,
                detail=detail,
                sample=record.key,
                source=record.source,
                layer=layer,
                token=None if rows is None else int(rows[0]),
                rows=None if rows is None else len(rows),
                shard=shard_name(self.row.shard),
            )
        )


def _check_equal_layers(record: SampleRecord, names: tuple[str, ...], found: _Found) -> None:
    """Two layers of a working model never agree in every bit; equal checksums mean that one was stored twice."""
    seen: dict[str, str] = {}
    for entry in record.tensors:
        if entry.name not in names:
            continue
        if entry.checksum in seen:
            found.add("layers-equal", f"the same bytes as {seen[entry.checksum]}", layer=entry.name)
        seen.setdefault(entry.checksum, entry.name)


def _array(data: bytearray | None, dtype: Any) -> NDArray[Any]:
    usable = data or b""
    size = np.dtype(dtype).itemsize
    return np.frombuffer(usable, dtype, count=len(usable) // size)


def batches(rows: Iterator[IndexedSample], num_bytes: int, num_samples: int) -> Iterator[list[IndexedSample]]:
    """Cut samples into pieces of work."""
    batch: list[IndexedSample] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += sum(entry.num_bytes for entry in row.record.tensors)
        if size >= num_bytes or len(batch) >= num_samples:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
