"""Several shards at a time: what `begin_add` promises, on a disk that is slow, fails or vanishes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import pytest

from hsdump.errors import StoreError
from hsdump.store import Store, StoreWriter, WriterOptions, past_cache, shard_writer, side_by_side
from hsdump.store.format import PARTIAL_SUFFIX, SHARDS_FOLDER, shard_path
from tests.store.conftest import PROFILE
from tests.store.faults import Crash, FaultyFs
from tests.store.making import Made, assert_equal, assert_holds, fill, make_manifest, make_sample

SHARD_BYTES = 12_000
"""A sample has up to 2,700 bytes."""

MANIFEST = make_manifest()


@pytest.fixture(autouse=True)
def as_if_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small samples take the ways of large ones: into threads, and into files before their shard is done."""
    monkeypatch.setattr(side_by_side, "SMALL_BYTES", 0)
    monkeypatch.setattr(shard_writer, "BUFFER_BYTES", 1000)
    monkeypatch.setattr(past_cache, "BLOCK_BYTES", 4096)


@pytest.fixture(params=[False, True], ids=["cached", "direct"])
def fs(request: pytest.FixtureRequest) -> Iterator[FaultyFs]:
    found = FaultyFs()
    found.direct = request.param
    yield found
    found.fill_gate.set()
    assert not found.open_files, "descriptors are left open"


def options(fs: FaultyFs, *, count: int = 3, shard_bytes: int = SHARD_BYTES) -> WriterOptions:
    return WriterOptions(fs=fs, shards_at_once=count, shard_bytes=shard_bytes, direct=fs.direct)


def begin(writer: StoreWriter, made: Made) -> Future[bool]:
    return writer.begin_add(writer.encode(made.sample, made.states))


def keys_of(made: Sequence[Made]) -> list[str]:
    return [one.sample.key for one in made]


def shards_of(path: Path) -> list[str]:
    return sorted(shard.name for shard in (path / SHARDS_FOLDER).iterdir())


def test_a_disk_that_keeps_up_gets_the_same_bytes_as_from_add(tmp_path: Path, fs: FaultyFs) -> None:
    made = fill(tmp_path / "one", range(30), MANIFEST, WriterOptions(shard_bytes=SHARD_BYTES))
    with StoreWriter.open(tmp_path / "other", MANIFEST, options=options(fs)) as writer:
        for one in made:
            assert begin(writer, one).result(60)
        assert writer.commit() == keys_of(made)
    assert len(shards_of(tmp_path / "one")) > 3
    assert shards_of(tmp_path / "one") == shards_of(tmp_path / "other")
    for name in shards_of(tmp_path / "one"):
        ours, theirs = (tmp_path / store / SHARDS_FOLDER / name for store in ("one", "other"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_slow_disk_gets_several_shards_and_keys_keep_their_order(tmp_path: Path, fs: FaultyFs) -> None:
    made = [make_sample(seed, MANIFEST, num_tokens=45) for seed in range(5)]
    with StoreWriter.open(tmp_path / "store", MANIFEST, options=options(fs)) as writer:
        fs.fill_gate.clear()
        futures = [begin(writer, one) for one in made]
        assert all(writer.is_known(one.sample.key) for one in made)
        commit = writer.begin_commit()  # does not wait for them
        assert not any(future.done() for future in futures)
        assert not commit.done()
        assert len(Store(tmp_path / "store")) == 0
        fs.fill_gate.set()
        assert commit.result(60) == keys_of(made)
        assert all(future.result(0) for future in futures)
    assert len(shards_of(tmp_path / "store")) == 3
    assert_holds(tmp_path / "store", made)


def test_a_burst_alone_begins_no_further_shard(tmp_path: Path, fs: FaultyFs) -> None:
    made = [make_sample(seed) for seed in range(2)]
    with StoreWriter.open(tmp_path / "store", MANIFEST, options=options(fs, shard_bytes=1 << 30)) as writer:
        fs.fill_gate.clear()
        futures = [begin(writer, one) for one in made]
        fs.fill_gate.set()
        assert all(future.result(60) for future in futures)
        writer.commit()
    assert len(shards_of(tmp_path / "store")) == 1


def test_who_adds_waits_while_all_threads_are_behind(tmp_path: Path, fs: FaultyFs) -> None:
    made = [make_sample(seed, MANIFEST, num_tokens=45) for seed in range(5)]
    with StoreWriter.open(tmp_path / "store", MANIFEST, options=options(fs, count=2)) as writer:
        fs.fill_gate.clear()
        for one in made[:4]:
            begin(writer, one)
        last = threading.Thread(target=begin, args=(writer, made[4]))
        last.start()
        last.join(0.2)
        assert last.is_alive()
        fs.fill_gate.set()
        last.join(60)
        assert writer.commit() == keys_of(made)


def test_equal_content_is_one_sample_from_the_moment_of_adding(tmp_path: Path, fs: FaultyFs) -> None:
    one, released = make_sample(1), list[str]()
    with StoreWriter.open(tmp_path / "store", MANIFEST, options=options(fs)) as writer:
        fs.fill_gate.clear()
        first = begin(writer, one)
        encoded = writer.encode(one.sample, one.states)
        assert writer.begin_add(encoded, lambda: released.append("second")).result(0) is False
        assert released == ["second"]
        assert not writer.add(one.sample, one.states)
        fs.fill_gate.set()
        assert first.result(60)
        assert writer.commit() == [one.sample.key]


def test_both_ways_of_adding_belong_to_one_commit(tmp_path: Path, fs: FaultyFs) -> None:
    made = [make_sample(seed) for seed in range(12)]
    with StoreWriter.open(tmp_path / "store", MANIFEST, options=options(fs)) as writer:
        for number, one in enumerate(made):
            if number % 2:
                writer.add(one.sample, one.states)
            else:
                begin(writer, one)
        assert writer.commit() == keys_of(made)
    assert_holds(tmp_path / "store", made)


def test_memory_is_released_once_and_only_when_the_bytes_are_written(tmp_path: Path, fs: FaultyFs) -> None:
    made = [make_sample(seed, MANIFEST, num_tokens=45) for seed in range(3)]
    released: list[int] = []
    with StoreWriter.open(tmp_path / "store", MANIFEST, options=options(fs)) as writer:
        fs.fill_gate.clear()
        futures = []
        for number, one in enumerate(made):
            encoded = writer.encode(one.sample, [state.copy() for state in one.states])

            def spoil(number: int = number, states: Sequence[object] = [part.data for part in encoded.parts]) -> None:
                released.append(number)
                for state in states:
                    state.setflags(write=True)  # type: ignore[attr-defined]  # arrays
                    state.fill(1)  # type: ignore[attr-defined]

            futures.append(writer.begin_add(encoded, spoil))
        assert not any(future.cancel() for future in futures)
        assert released == []
        fs.fill_gate.set()
        assert all(future.result(60) for future in futures)
        assert sorted(released) == [0, 1, 2]
        writer.commit()
    assert_holds(tmp_path / "store", [make_sample(seed, MANIFEST, num_tokens=45) for seed in range(3)])


def test_full_means_that_one_shard_is_full_and_none_small(tmp_path: Path, fs: FaultyFs) -> None:
    made = [make_sample(seed, MANIFEST, num_tokens=45) for seed in range(200)]
    sizes: list[int] = []
    with StoreWriter.open(tmp_path / "store", MANIFEST, options=options(fs)) as writer:
        for one in made:
            begin(writer, one)
            assert writer.pending_bytes <= 3 * (SHARD_BYTES + 2700)
            if writer.is_full:
                sizes.append(writer.pending_bytes)
                writer.begin_commit()
        rest = writer.commit()
    assert_holds(tmp_path / "store", made)
    assert len(sizes) > 3
    with Store(tmp_path / "store") as store:
        shards = {store.row(one.sample.key).shard for one in made if one.sample.key not in rest}
    assert min(shard_path(tmp_path / "store", number).stat().st_size for number in shards) >= SHARD_BYTES / 2


def test_what_was_added_and_not_committed_is_gone_after_close(tmp_path: Path, fs: FaultyFs) -> None:
    made = [make_sample(seed, MANIFEST, num_tokens=45) for seed in range(5)]
    released: list[int] = []
    writer = StoreWriter.open(tmp_path / "store", MANIFEST, options=options(fs))
    fs.fill_gate.clear()
    futures = [
        writer.begin_add(writer.encode(one.sample, one.states), lambda number=number: released.append(number))  # type: ignore[misc]  # its default
        for number, one in enumerate(made)
    ]
    threading.Timer(0.1, fs.fill_gate.set).start()
    writer.close()
    assert all(future.done() for future in futures)
    assert sorted(released) == list(range(5))
    assert shards_of(tmp_path / "store") == []
    assert_holds(tmp_path / "store", [])


def test_one_failing_write_breaks_the_writer_and_closes_all_files(tmp_path: Path, fs: FaultyFs) -> None:
    safe = make_sample(99)
    made = [make_sample(seed, MANIFEST, num_tokens=100) for seed in range(6)]  # each beyond what is kept in memory
    released: list[int] = []
    writer = StoreWriter.open(tmp_path / "store", MANIFEST, options=options(fs))
    begin(writer, safe)
    writer.commit()
    fs.fill_gate.clear()
    futures = [
        writer.begin_add(writer.encode(one.sample, one.states), lambda number=number: released.append(number))  # type: ignore[misc]  # its default
        for number, one in enumerate(made)
    ]
    commit = writer.begin_commit()
    fs.kind, fs.fuse = "error", fs.operations + 9
    fs.fill_gate.set()
    with pytest.raises(StoreError, match="the test's disk"):
        commit.result(60)
    errors = [error for future in futures if (error := future.exception(60)) is not None]
    assert errors
    assert all(isinstance(error, StoreError) for error in errors)
    with pytest.raises(StoreError, match="cannot be written any more"):
        begin(writer, make_sample(7))
    assert sorted(released) == list(range(6))
    with pytest.raises(StoreError, match="the test's disk"):
        writer.close()
    with StoreWriter.open(tmp_path / "store", MANIFEST) as writer:
        assert writer.is_committed(safe.sample.key)
    assert not list((tmp_path / "store").rglob("*" + PARTIAL_SUFFIX))
    assert_holds(tmp_path / "store", [safe])


@pytest.mark.parametrize("direct", [False, True], ids=["cached", "direct"])
@pytest.mark.parametrize("kind", ["crash", "error"])
def test_no_operation_may_fail_and_lose_or_damage_a_committed_sample(
    fast_folder: Path, kind: str, direct: bool
) -> None:
    made = [make_sample(seed, MANIFEST, num_tokens=5 + seed) for seed in range(24)]
    step = {"dev": 3, "ci": 1, "nightly": 1}[PROFILE]
    for fuse in range(1, 1000, step):
        path = fast_folder / f"{kind}-{fuse}"
        fs = FaultyFs(kind=kind, seed=fuse)
        fs.worst, fs.direct = fuse % 2 == 0, direct
        promised = _write_until_it_fails(path, made, fs, fuse)
        assert not fs.open_files, fuse
        if fs.dead:
            fs.lose_power()
        with StoreWriter.open(path, MANIFEST):
            pass
        assert not list(path.rglob("*" + PARTIAL_SUFFIX))
        with Store(path, check=True) as store:
            assert set(promised) <= set(store.keys()), fuse
            for one in made:
                if one.sample.key in store:
                    assert_equal(store, one)
        if len(promised) == len(made):
            assert fuse > 60, "too few operations for a test"
            return
    raise AssertionError("it never came to an end")


def _write_until_it_fails(path: Path, made: list[Made], fs: FaultyFs, fuse: int) -> list[str]:
    """Give the keys that a commit returned."""
    writer = StoreWriter.open(path, MANIFEST, options=options(fs, shard_bytes=2500))
    fs.fuse = fs.operations + fuse
    commits: list[Future[list[str]]] = []
    promised: list[str] = []
    try:
        for one in made:
            begin(writer, one)
            if writer.is_full:
                commits.append(writer.begin_commit())
        last = writer.commit()
        promised += last
        writer.close()
    except (Crash, StoreError):
        with suppress(Crash, StoreError):
            writer.close()
    for commit in commits:
        if commit.exception(60) is None:
            promised += commit.result()
    return promised
