"""Stores made from stores: joined, divided, thinned out, encoded anew. Bytes are copied as they are stored, proved.

Letters: S = tokens of one sample, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from hsdump.arrays import to_float32
from hsdump.errors import StoreCorrupt, StoreMismatch, UsageError
from hsdump.samples import TokenSample
from hsdump.store.codecs import check_codec
from hsdump.store.format import REMOTE_NAME, shard_name
from hsdump.store.fs import Fs
from hsdump.store.index import Event, IndexedSample
from hsdump.store.manifest import Manifest, differences
from hsdump.store.opening import disk_errors
from hsdump.store.options import WriterOptions
from hsdump.store.reader import Store, StoredSample
from hsdump.store.remote import as_url
from hsdump.store.writer import StoreWriter

Progress = Callable[[int, int], None]
"""Called with samples and bytes done since the last call."""

FP8_ERROR = 0.04
"""Most that a state may lose by fp8, as ||decoded - original|| / ||original||. Rounding to 3 mantissa bits costs at
most 3.6 %, that to bfloat16 0.3 % more.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SurgeryOptions:
    """How to go about it."""

    dry_run: bool = False
    """Say what would be done."""

    writer: WriterOptions = field(default_factory=WriterOptions)
    progress: Progress | None = None


class SurgeryReport(msgspec.Struct, kw_only=True):
    """What was done, or would be."""

    action: str
    dry_run: bool
    samples: dict[str, int] = {}
    """Store to samples written to it or taken out of it."""

    already: int = 0
    """Samples that were there: from an earlier run, or from another of the stores."""

    num_bytes: int = 0
    errors: dict[str, float] = {}
    """Lossy recoding: state to its largest relative error."""


def merge(sources: Sequence[Path], out: Path, options: SurgeryOptions) -> SurgeryReport:
    """Copy all samples of several stores into one; a sample that several have is taken once.

    Raises:
        StoreMismatch: they are not of one kind.
        StoreCorrupt: a sample's bytes do not hold; nothing of it is taken.
    """
    report = SurgeryReport(action="merge", dry_run=options.dry_run, samples={str(out): 0})
    stores = [Store(path) for path in sources]
    for path, store in zip(sources[1:], stores[1:], strict=True):
        _refuse_other(sources[0], stores[0].manifest, path, store.manifest)
    if options.dry_run:
        keys = set().union(*(store.keys() for store in stores))
        report.samples[str(out)], report.already = len(keys), sum(len(store) for store in stores) - len(keys)
        return report
    with StoreWriter.open(out, stores[0].manifest, options=options.writer) as writer:
        for store in stores:
            _copy(store, (store.row(place) for place in range(len(store))), writer, options, report)
            for failure in store.failures().values():
                writer.record_failure_of(failure)
            for row in store.skipped_rows():
                writer.record_skip(row.source, row.reason, row.detail)
    return report


def split(source: Path, shares: dict[Path, float], options: SurgeryOptions, seed: int = 0) -> SurgeryReport:
    """Divide a store's samples among new stores; the source stays.

    A sample's place follows from its tokens and the seed alone, so that it is the same for every store that holds it:
    what was in the validation part stays there when the data set grows, and twins under another mask go together.

    Args:
        shares: store to its share of the samples; they add up to 1.

    Raises:
        UsageError: shares that do not add up.
    """
    if not shares or min(shares.values()) <= 0 or abs(sum(shares.values()) - 1) > 1e-6:
        raise UsageError(f"shares {list(shares.values())} do not add up to 1", "for instance: --shares 0.95,0.05")
    store = Store(source)
    bounds = np.cumsum(list(shares.values()))
    bounds[-1] = 1.0
    report = SurgeryReport(action="split", dry_run=options.dry_run, samples={str(out): 0 for out in shares})
    if options.dry_run:
        for row in (store.row(place) for place in range(len(store))):
            report.samples[str(list(shares)[_part(row, bounds, seed)])] += 1
        return report
    for number, out in enumerate(shares):
        with StoreWriter.open(out, store.manifest, options=options.writer) as writer:
            rows = (store.row(place) for place in range(len(store)))
            _copy(store, (row for row in rows if _part(row, bounds, seed) == number), writer, options, report)
    return report


def remove(path: Path, keys: Iterable[str], options: SurgeryOptions) -> SurgeryReport:
    """Take samples out. Their shards are written anew without them; the old files are deleted at last.

    Raises:
        UsageError: a key that the store does not have; nothing is taken out.
    """
    wanted = set(keys)
    report = SurgeryReport(action="rm", dry_run=options.dry_run, samples={str(path): len(wanted)})
    with Store(path) as store:
        missing = sorted(key for key in wanted if key not in store)
        if missing:
            what = f"{path} has no sample {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"
            raise UsageError(what, "list what it has with `hsdump store ls`")
        rows = [store.row(key) for key in wanted]
        report.num_bytes = sum(entry.num_bytes for row in rows for entry in row.record.tensors)
    if options.dry_run:
        return report
    with StoreWriter.reopen(path, options=options.writer) as writer:
        for number in sorted({row.shard for row in rows}):
            with Store(path) as store:
                keep = [row for row in store.rows_of(number) if row.record.key not in wanted]
                parts = [(row.record, store.proved_parts(row)) for row in keep]
                removed = len(store.rows_of(number)) - len(keep)
                event = Event(kind="samples-removed", subject=shard_name(number), detail=f"{removed} samples removed")
                writer.replace_shard(number, parts, event, delete=True)
    return report


def recode(source: Path, out: Path, codec: str, options: SurgeryOptions, *, replace: bool = False) -> SurgeryReport:
    """Write a store anew with another codec, and prove each sample of it against the source before that may go.

    Args:
        replace: when all is written and proved, `out` takes the place of the source, which is deleted.

    Raises:
        UsageError: the codec is the same, the source is lossy already, or `replace` of a store at a URL.
        StoreCorrupt: what was written does not decode to what was read; the source is untouched.
    """
    check_codec(codec)
    if replace and (as_url(source) or (source / REMOTE_NAME).exists()):
        what = f"the shards of {source} are at a URL, which cannot be replaced in one step"
        raise UsageError(what, "recode into a new folder, and push that one to a new URL")
    if replace and _finish_replacing(source, out, options.writer.fs):
        return SurgeryReport(action="recode", dry_run=False, samples={str(source): 0}, already=len(Store(source)))
    store = Store(source)
    if store.manifest.codec in {codec, "fp8"}:
        what = f"{source} has the codec {store.manifest.codec}"
        raise UsageError(what, "nothing to do" if store.manifest.codec == codec else "capture again for another codec")
    report = SurgeryReport(action="recode", dry_run=options.dry_run, samples={str(out): len(store)})
    if options.dry_run:
        return report
    report.samples[str(out)] = 0
    manifest = msgspec.structs.replace(store.manifest, codec=codec)
    with StoreWriter.open(out, manifest, options=options.writer) as writer:
        for place in range(len(store)):
            _recode_one(store, store.row(place), writer, report)
            if options.progress:
                options.progress(1, store[place].num_tokens * manifest.shape.bytes_per_token)
        writer.commit()
        for failure in store.failures().values():
            writer.record_failure_of(failure)
        for row in store.skipped_rows():
            writer.record_skip(row.source, row.reason, row.detail)
    _prove_recoded(store, out, report)
    store.close()
    if replace:
        fs = options.writer.fs
        with disk_errors(source):
            fs.rename(source, _aside(source))
            fs.sync_folder(source.parent)
        _finish_replacing(source, out, fs)
    return report


def _aside(source: Path) -> Path:
    return source.with_name(source.name + ".before-recode")


def _finish_replacing(source: Path, out: Path, fs: Fs) -> bool:
    """Put a proved copy in the place of the store that was moved aside for it; also after dying in between."""
    aside = _aside(source)
    if not aside.exists():
        return False
    with disk_errors(source):
        if not source.exists():
            fs.rename(out, source)
            fs.sync_folder(out.parent)
            fs.sync_folder(source.parent)
        fs.remove_tree(aside)
    return True


def _refuse_other(first: Path, one: Manifest, second: Path, other: Manifest) -> None:
    found = differences(one, other)
    if found:
        what = f"{first} and {second} hold different things:\n    " + "\n    ".join(found)
        fix = "merge stores of one capture; `hsdump store recode` makes codecs equal"
        raise StoreMismatch(what.replace("this run has", f"{second.name} has"), fix)


def _copy(
    store: Store, rows: Iterable[IndexedSample], writer: StoreWriter, options: SurgeryOptions, report: SurgeryReport
) -> None:
    for row in rows:
        size = sum(entry.num_bytes for entry in row.record.tensors)
        if writer.is_known(row.record.key):
            report.already += 1
        else:
            writer.copy(row.record, store.proved_parts(row))
            report.samples[str(writer.path)] += 1
            report.num_bytes += size
        if writer.is_full:
            writer.commit()
        if options.progress:
            options.progress(1, size)
    writer.commit()


def _part(row: IndexedSample, bounds: np.ndarray, seed: int) -> int:
    tokens = next(entry.checksum for entry in row.record.tensors if entry.name == "input_ids")
    place = xxhash.xxh3_64_intdigest(f"{seed}:{tokens}".encode()) / 2.0**64
    return int(np.searchsorted(bounds, place, side="right").clip(max=len(bounds) - 1))


def _recode_one(store: Store, row: IndexedSample, writer: StoreWriter, report: SurgeryReport) -> None:
    if writer.is_known(row.record.key):
        report.already += 1
        return
    store.proved_parts(row)
    sample = store[row.record.key]
    tokens = TokenSample(key=sample.key, source=sample.source, input_ids=sample.input_ids, loss_mask=sample.loss_mask)
    writer.add(tokens, list(sample.states.values()), attempts=row.record.attempts)
    report.samples[str(writer.path)] += 1
    if writer.is_full:
        writer.commit()


def _prove_recoded(store: Store, out: Path, report: SurgeryReport) -> None:
    """Read everything back; earlier runs' samples, too."""
    with Store(out, check=True) as written:
        if written.keys() != store.keys():
            raise StoreCorrupt(
                f"{out} has {len(written)} samples instead of {len(store)}", "run the same command again"
            )
        for sample in store:
            found = written[sample.key]
            for name, error in _errors(sample, found, store.manifest.dtype):
                if not error <= (FP8_ERROR if written.manifest.codec == "fp8" else 0.0):
                    what = f"{out}: sample {sample.key} lost {error:.3g} of {name}"
                    raise StoreCorrupt(what, "keep the source, and report this")
                report.errors[name] = max(error, report.errors.get(name, 0.0))


def _errors(sample: StoredSample, found: StoredSample, dtype: str) -> Iterable[tuple[str, float]]:
    for name, state_SH in sample.states.items():
        if np.array_equal(state_SH, found.states[name]):
            yield name, 0.0
            continue
        original, decoded = to_float32(state_SH, dtype), to_float32(found.states[name], dtype)
        sound = np.isfinite(original).all(axis=1)  # rows that are not finite are NaN in fp8
        size = float(np.linalg.norm(original[sound]))
        yield name, float(np.linalg.norm(decoded[sound] - original[sound])) / size if size else 0.0
