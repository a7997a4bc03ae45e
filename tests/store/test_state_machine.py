"""A store against a plain dict, while the disk fails, tears writes, loses power and loses files, in any order.

Under fire are opening, adding, committing in either thread, recording failures, removing, repairing, merging,
splitting and recoding.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hsdump.errors import StoreError
from hsdump.store import Store, StoreWriter, WriterOptions
from hsdump.store.format import INDEX_NAME, MANIFEST_NAME, PARTIAL_SUFFIX, SHARDS_FOLDER, shard_path
from hsdump.store.scrub import repair
from hsdump.store.surgery import SurgeryOptions, merge, recode, remove, split
from tests.store.conftest import MACHINE_SETTINGS, memory_folder
from tests.store.faults import Crash, FaultyFs
from tests.store.making import Made, assert_equal, assert_holds, make_manifest, make_sample

MANIFEST = make_manifest()
SEEDS = st.integers(0, 5)
"""Few samples, so that the same one fails, is committed, is lost and comes again."""

SAMPLES = {seed: make_sample(seed, MANIFEST) for seed in range(6)}

FUSES = st.one_of(st.none(), st.integers(1, 25))
"""Operations until the disk fails; None: it does not."""

KINDS = st.sampled_from(["crash", "error"])


class StoreMachine(RuleBasedStateMachine):
    """The oracle holds samples and failures that a returned call promised; it shares no code with the store."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = memory_folder()
        self.path = self.folder / "store"
        self.committed: dict[str, Made] = {}
        self.added: dict[str, Made] = {}
        self.failures: dict[str, str] = {}
        self.shard_of: dict[str, int] = {}
        self.fs = FaultyFs()
        self.writer: StoreWriter | None = None
        self.under_way: Future[list[str]] | None = None
        self.committing: dict[str, Made] = {}

    def teardown(self) -> None:
        self._give_up_writer()
        shutil.rmtree(self.folder)

    @rule(fuse=FUSES, kind=KINDS, seed=st.integers(0, 999), size=st.sampled_from([1, 3000]))
    def open(self, fuse: int | None, kind: str, seed: int, size: int) -> None:
        """Open, perhaps on a disk that will fail, now or later."""
        self.close()
        self.fs = FaultyFs(fuse, kind=kind, seed=seed)
        self._try(lambda: self._open(size))

    def _open(self, size: int) -> None:
        options = WriterOptions(shard_bytes=size, fs=self.fs)
        self.writer = StoreWriter.open(self.path, MANIFEST, options=options)

    @precondition(lambda self: self.writer is not None)
    @rule(seeds=st.lists(SEEDS, min_size=1, max_size=4, unique=True))
    def add(self, seeds: list[int]) -> None:
        for made in (SAMPLES[seed] for seed in seeds):
            known = made.sample.key in {**self.committed, **self.added, **self.committing}
            if self.writer is None or known:
                continue
            writer = self.writer
            self.added[made.sample.key] = made
            self._try(lambda writer=writer, made=made: writer.add(made.sample, made.states))

    @precondition(lambda self: self.writer is not None)
    @rule()
    def commit(self) -> None:
        assert self.writer is not None
        writer, expected = self.writer, list(self.added)
        self.settle()
        if self.writer is None:
            return
        keys: list[str] = []
        self._try(lambda: keys.extend(writer.commit()))
        if self.writer is not None:
            assert keys == expected
            self._promise(self.added)
            self.added = {}

    @precondition(lambda self: self.writer is not None and self.under_way is None)
    @rule()
    def begin_commit(self) -> None:
        """A second thread commits; it is held at its first operation until somebody waits for it."""
        assert self.writer is not None
        writer = self.writer
        self.fs.gate.clear()
        self.committing, self.added = self.added, {}
        self._try(lambda: setattr(self, "under_way", writer.begin_commit()))

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def settle(self) -> None:
        """Let the commit under way go on, and wait for it."""
        future, self.under_way = self.under_way, None
        self.fs.gate.set()
        if future is None:
            return
        keys: list[str] = []
        self._try(lambda: keys.extend(future.result(60)))
        if self.writer is not None:
            assert keys == list(self.committing)
            self._promise(self.committing)
            self.committing = {}

    @precondition(lambda self: self.writer is not None)
    @rule(seed=SEEDS, reason=st.sampled_from(["timeout", "nan"]))
    def fail(self, seed: int, reason: str) -> None:
        assert self.writer is not None
        writer, sample = self.writer, SAMPLES[seed].sample
        before = dict(self.failures)
        if sample.key not in self.committed:
            self.failures[sample.key] = reason
        self._try(lambda: writer.record_failure(sample, reason, "", attempts=1), failures_before=before)

    @precondition(lambda self: self.writer is not None)
    @rule(operations=st.integers(1, 9), kind=KINDS)
    def arm(self, operations: int, kind: str) -> None:
        """Let the disk fail soon: a commit takes about nine operations."""
        self.fs.fuse, self.fs.kind = self.fs.operations + operations, kind

    @precondition(lambda self: self.added)
    @rule()
    def commit_what_waits(self) -> None:
        """The same as `commit`, which the search would otherwise mostly try on nothing."""
        self.commit()

    @precondition(lambda self: self.writer is not None)
    @rule()
    def power_goes(self) -> None:
        """Between two calls, when everything promised must be durable already."""
        self.fs.dead = self.fs.worst = True
        self._give_up_writer()
        self._restart(None)

    @rule()
    def close(self) -> None:
        self.settle()
        self._give_up_writer()
        self.added = {}

    @precondition(lambda self: self.writer is None and self.committed)
    @rule(data=st.data(), how=st.sampled_from(["remove", "cut", "index", "manifest"]))
    def lose(self, data: st.DataObject, how: str) -> None:
        """Take something away between two runs; the next opening must notice and say so."""
        if how == "index":
            for suffix in ("", "-wal", "-shm"):
                (self.path / (INDEX_NAME + suffix)).unlink(missing_ok=True)
            self.failures = {}
        elif how == "manifest":
            (self.path / MANIFEST_NAME).unlink()
        else:
            number = data.draw(st.sampled_from(sorted(set(self.shard_of.values()))))
            path = shard_path(self.path, number)
            if how == "cut":
                path.write_bytes(path.read_bytes()[: data.draw(st.integers(0, path.stat().st_size - 1))])
            else:
                path.unlink()
            for key in [key for key, place in self.shard_of.items() if place == number]:
                del self.committed[key], self.shard_of[key]
        self.fs = FaultyFs()
        self._open(1)
        self._give_up_writer()

    @precondition(lambda self: self.writer is None and self.committed)
    @rule(data=st.data(), fuse=FUSES, kind=KINDS)
    def remove(self, data: st.DataObject, fuse: int | None, kind: str) -> None:
        """Take samples out; dying in between may leave some of them, and nothing else is touched."""
        keys = data.draw(st.lists(st.sampled_from(sorted(self.committed)), min_size=1, unique=True))
        self.fs = FaultyFs(fuse, kind=kind)
        done = self._try(lambda: remove(self.path, keys, self._surgery()))
        with Store(self.path) as store:
            left = set(store.keys())
        assert not done or not left & set(keys)
        for key in set(keys) - left:
            del self.committed[key]

    @precondition(lambda self: self.writer is None and self.committed)
    @rule(data=st.data(), fuse=FUSES, kind=KINDS)
    def repair(self, data: st.DataObject, fuse: int | None, kind: str) -> None:
        """One byte of one sample is wrong: that sample is lost, however often the repair dies, and no other."""
        key = data.draw(st.sampled_from(sorted(self.committed)))
        with Store(self.path) as store:
            row = store.row(key)
        entry = data.draw(st.sampled_from(row.record.tensors))
        _flip(shard_path(self.path, row.shard), entry.offset + data.draw(st.integers(0, entry.num_bytes - 1)))
        self.fs = FaultyFs(fuse, kind=kind)
        lost: list[str] = []
        if not self._try(lambda: lost.extend(repair(self.path, options=WriterOptions(fs=self.fs)).missing)):
            # It may have died with the new shard in place; what then is left to repair is nothing.
            lost = repair(self.path).missing or [key]
        assert lost == [key]
        del self.committed[key]

    @precondition(lambda self: self.writer is None and self.committed)
    @rule(fuse=FUSES, kind=KINDS, how=st.sampled_from(["merge", "split", "recode", "replace"]))
    def derive(self, fuse: int | None, kind: str, how: str) -> None:
        """Make stores of this one on a disk that fails; the same command again finishes, and the source stays."""
        out, other = self.folder / "out", self.folder / "other"
        act: dict[str, Callable[[SurgeryOptions], object]] = {
            "merge": lambda options: merge([self.path], out, options),
            "split": lambda options: split(self.path, {out: 0.5, other: 0.5}, options),
            "recode": lambda options: recode(self.path, out, "blosc2", options),
            "replace": lambda options: recode(copy, out, "blosc2", options, replace=True),
        }
        copy = self.folder / "copy"
        if how == "replace":
            shutil.copytree(self.path, copy)
        fs = FaultyFs(fuse, kind=kind)
        try:
            act[how](SurgeryOptions(writer=WriterOptions(fs=fs, shard_bytes=3000)))
        except (Crash, StoreError):
            assert fuse is not None
            if fs.dead:
                fs.lose_power()
            act[how](SurgeryOptions())
        made = [copy] if how == "replace" else [out, other] if how == "split" else [out]
        _assert_hold_together(made, self.committed.values())
        assert how != "replace" or not out.exists()
        for path in (out, other, copy):
            shutil.rmtree(path, ignore_errors=True)

    def _surgery(self) -> SurgeryOptions:
        return SurgeryOptions(writer=WriterOptions(fs=self.fs))

    @invariant()
    def holds_what_was_promised_and_nothing_else(self) -> None:
        if not (self.path / MANIFEST_NAME).exists():
            assert not self.committed
            return
        with Store(self.path, check=True) as store:
            assert sorted(store.keys()) == sorted(self.committed)
            for made in self.committed.values():
                assert_equal(store, made)
            assert {key: failure.reason for key, failure in store.failures().items()} == self.failures
            self.shard_of = {key: store.row(key).shard for key in self.committed}

    def _try(self, act: Callable[[], object], failures_before: dict[str, str] | None = None) -> bool:
        """Do it; when the disk fails, restart on a sound one and find out what became of what was under way."""
        try:
            act()
        except (Crash, StoreError):
            if self.fs.fuse is None:
                raise
            self._give_up_writer()
            self._restart(failures_before)
            return False
        return True

    def _restart(self, failures_before: dict[str, str] | None) -> None:
        self.fs = FaultyFs()
        under_way = {**self.committing, **self.added}
        with StoreWriter.open(self.path, MANIFEST, options=WriterOptions(fs=self.fs)) as writer:
            survived = {key: made for key, made in under_way.items() if writer.is_committed(key)}
            kept = {key: failure.reason for key, failure in writer.failures().items()}
        self._promise(survived)
        self.added, self.committing, self.under_way = {}, {}, None
        if failures_before is not None and kept == failures_before:
            self.failures = failures_before  # the record was under way and did not make it
        assert not list((self.path / SHARDS_FOLDER).glob("*" + PARTIAL_SUFFIX))

    def _promise(self, made: dict[str, Made]) -> None:
        self.committed.update(made)
        for key in made:
            self.failures.pop(key, None)

    def _give_up_writer(self) -> None:
        writer, self.writer = self.writer, None
        self.fs.gate.set()
        if writer is not None:
            try:
                writer.close()
            except (Crash, StoreError):
                if self.fs.fuse is None and not self.fs.dead:
                    raise
        if self.fs.dead:
            self.fs.lose_power()


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def _assert_hold_together(paths: list[Path], expected: Iterable[Made]) -> None:
    """Each sample is in exactly one of the stores, bit for bit."""
    found = {path: set(Store(path).keys()) for path in paths}
    assert sum(map(len, found.values())) == len(list(expected))
    for path, keys in found.items():
        assert_holds(path, [made for made in expected if made.sample.key in keys])


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = MACHINE_SETTINGS
