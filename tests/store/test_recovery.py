"""Every kind of damage that opening a store must put in order, each made by hand."""

from __future__ import annotations

import os
import shutil
import sqlite3
from itertools import chain
from pathlib import Path

import pytest

from hsdump.errors import StoreError
from hsdump.store import Store, StoreWriter, WriterOptions
from hsdump.store.format import shard_path
from tests.store.faults import Crash, FaultyFs
from tests.store.making import Made, assert_holds, fill, make_manifest, make_sample


def reopen(path: Path) -> list[tuple[str, str]]:
    """Open for writing and give what was put in order, which must be in the store's own records, too."""
    with StoreWriter.open(path, make_manifest()) as writer:
        events = writer.recovered
    with Store(path) as store:
        assert [(event.kind, event.subject) for event in store.events()][-len(events) or None :] == [
            (event.kind, event.subject) for event in events
        ]
    return [(event.kind, event.subject) for event in events]


def three_shards(path: Path) -> list[list[Made]]:
    return [fill(path, range(first, first + 3)) for first in (0, 3, 6)]


def quarantined(path: Path) -> list[str]:
    return sorted(name.name for name in (path / "quarantine").iterdir()) if (path / "quarantine").exists() else []


def test_nothing_to_do(tmp_path: Path) -> None:
    three_shards(tmp_path / "store")
    assert reopen(tmp_path / "store") == []


def test_unfinished_files_are_removed_and_named(tmp_path: Path) -> None:
    made = fill(tmp_path / "store", range(3))
    (tmp_path / "store" / "shards" / "000001.safetensors.partial").write_bytes(b"half a sample")
    (tmp_path / "store" / "manifest.json.partial").write_bytes(b"{")
    assert reopen(tmp_path / "store") == [
        ("partial-removed", "manifest.json.partial"),
        ("partial-removed", "000001.safetensors.partial"),
    ]
    assert_holds(tmp_path / "store", made)


def test_a_lost_shard_makes_its_samples_missing_by_name(tmp_path: Path) -> None:
    path = tmp_path / "store"
    groups = three_shards(path)
    shard_path(path, 1).unlink()
    assert reopen(path) == [("sample-lost", one.sample.key) for one in groups[1]]
    assert_holds(path, groups[0] + groups[2])
    assert_holds(path, groups[0] + groups[2] + fill(path, range(3, 6)))  # captured again
    assert not shard_path(path, 1).exists()  # a number is given once
    assert shard_path(path, 3).exists()


def test_a_cut_shard_goes_to_quarantine_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "store"
    groups = three_shards(path)
    os.truncate(shard_path(path, 2), 1000)
    assert reopen(path) == [
        ("shard-quarantined", "000002.safetensors"),
        *(("sample-lost", one.sample.key) for one in groups[2]),
    ]
    assert_holds(path, groups[0] + groups[1])
    shard, reason = quarantined(path)
    assert shard.endswith("-000002.safetensors")
    assert "it has 1000 bytes instead of" in (path / "quarantine" / reason).read_text()
    fill(path, range(6, 9))
    assert shard_path(path, 3).exists()  # not 2, whose remains are still there


def test_a_shard_without_rows_is_adopted_after_its_checksums_held(tmp_path: Path) -> None:
    path = tmp_path / "store"
    groups = three_shards(path)
    for number in (0, 2):
        _forget(path, number)
    with shard_path(path, 2).open("r+b") as file:
        file.seek(-200, os.SEEK_END)
        file.write(b"\xff")
    assert reopen(path) == [("shard-indexed", "000000.safetensors"), ("shard-quarantined", "000002.safetensors")]
    assert_holds(path, groups[0] + groups[1])


def test_a_shard_of_another_data_set_is_not_adopted(tmp_path: Path) -> None:
    fill(tmp_path / "other", range(3), make_manifest(layers=[1, 3]))
    made = fill(tmp_path / "store", range(3, 6))
    shutil.copy(shard_path(tmp_path / "other", 0), shard_path(tmp_path / "store", 1).with_name("000001.safetensors"))
    events = reopen(tmp_path / "store")
    assert [kind for kind, _ in events] == ["shard-quarantined"]
    fill(tmp_path / "other", range(3, 6), make_manifest(layers=[1, 3]))
    shutil.copy(shard_path(tmp_path / "other", 1), shard_path(tmp_path / "store", 1).with_name("000001.safetensors"))
    assert reopen(tmp_path / "store") == [("shard-quarantined", "000001.safetensors")]
    assert_holds(tmp_path / "store", made)


def test_a_deleted_index_is_made_again_from_the_shards_alone(tmp_path: Path) -> None:
    path = tmp_path / "store"
    made = list(chain(*three_shards(path)))
    (path / "index.sqlite").unlink()
    assert_holds(path, made)  # a reader needs no writer for that
    assert reopen(path)[0] == ("index-rebuilt", "index.sqlite")
    assert_holds(path, made)
    with Store(path) as store:
        assert store.keys() == [one.sample.key for one in made]


@pytest.mark.parametrize("damage", [b"", b"not a database", None])
def test_a_damaged_index_is_set_apart_and_made_again(tmp_path: Path, damage: bytes | None) -> None:
    path = tmp_path / "store"
    made = list(chain(*three_shards(path)))
    index = path / "index.sqlite"
    if damage is None:  # a page in the middle
        with index.open("r+b") as file:
            file.seek(4096 * 3)
            file.write(b"\xa5" * 4096)
    else:
        index.write_bytes(damage * 1000)
    reopen(path)
    assert_holds(path, made)
    if damage != b"":  # sqlite takes an empty file for a new database
        assert any("index.sqlite" in name for name in quarantined(path))


def test_an_index_of_another_store_is_set_apart(tmp_path: Path) -> None:
    fill(tmp_path / "other", range(3), make_manifest(max_tokens=17))
    made = fill(tmp_path / "store", range(3))
    shutil.copy(tmp_path / "other" / "index.sqlite", tmp_path / "store" / "index.sqlite")
    assert ("index-rebuilt", "index.sqlite") in reopen(tmp_path / "store")
    assert_holds(tmp_path / "store", made)


@pytest.mark.parametrize("damage", [None, b"", b'{"format_version": 1}', b"\x00" * 300])
def test_a_lost_manifest_is_found_in_the_shards(tmp_path: Path, damage: bytes | None) -> None:
    path = tmp_path / "store"
    made = fill(path, range(3))
    before = (path / "manifest.json").read_bytes()
    (path / "manifest.json").unlink()
    if damage is not None:
        (path / "manifest.json").write_bytes(damage)
    assert reopen(path) == [("manifest-rebuilt", "manifest.json")]
    assert (path / "manifest.json").read_bytes() == before
    assert_holds(path, made)


def test_a_damaged_manifest_of_an_empty_store_is_set_apart(tmp_path: Path) -> None:
    path = tmp_path / "store"
    StoreWriter.open(path, make_manifest()).close()
    (path / "manifest.json").write_bytes(b"{")
    assert reopen(path) == [("manifest-quarantined", "manifest.json")]
    assert_holds(path, fill(path, range(2)))


def test_a_shard_that_came_back_does_not_double_its_samples(tmp_path: Path) -> None:
    path = tmp_path / "store"
    groups = three_shards(path)
    kept = shard_path(path, 1).read_bytes()
    shard_path(path, 1).unlink()
    fill(path, range(3, 6))
    shard_path(path, 1).write_bytes(kept)
    assert reopen(path) == [("shard-indexed", "000001.safetensors")]
    assert_holds(path, list(chain(*groups)))


def test_a_swapped_pair_is_not_trusted_when_the_index_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "store"
    groups = three_shards(path)
    shard_path(path, 0).rename(path / "shards" / "aside")
    shard_path(path, 1).rename(shard_path(path, 0))
    (path / "shards" / "aside").rename(shard_path(path, 1))
    (path / "index.sqlite").unlink()
    kinds = [kind for kind, _ in reopen(path)]
    assert kinds == ["index-rebuilt", "shard-quarantined", "shard-quarantined", "shard-indexed"]
    assert_holds(path, groups[2])


def test_dying_at_every_single_operation_of_a_commit_loses_nothing_promised(tmp_path: Path) -> None:
    """Goes through the operations one by one until a run survives; the state machine does it at random."""
    fuse, survived = 0, False
    while not survived:
        fuse += 1
        path = tmp_path / f"store{fuse}"
        made = fill(path, range(2))
        more = [make_sample(seed) for seed in range(2, 5)]
        fs = FaultyFs(fuse, seed=fuse)
        try:
            fill(path, range(2, 5), options=WriterOptions(fs=fs))
            survived = True
        except Crash:
            fs.lose_power()
        with Store(path) as store:
            here = [one for one in more if one.sample.key in store]
        assert here in ([], more)
        with StoreWriter.open(path, make_manifest()) as writer:
            here = [one for one in more if writer.is_committed(one.sample.key)]
        assert here in ([], more)
        assert_holds(path, made + here)
    assert fuse > 10  # all steps were there to die at


@pytest.mark.parametrize("kind", ["add", "commit"])
def test_a_full_disk_ends_the_writer_and_the_next_one_goes_on(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "store"
    made = fill(path, range(2))
    manifest = make_manifest()
    fs = FaultyFs(kind="error", seed=1)
    large = make_sample(7, manifest, num_tokens=100_000)  # beyond what is kept in memory
    small = make_sample(8, manifest)
    with StoreWriter.open(path, manifest, options=WriterOptions(fs=fs)) as writer:
        if kind == "add":
            fs.fuse = fs.operations + 2
            with pytest.raises(StoreError, match=r"store: .*\n  fix: make room or repair the disk"):
                writer.add(large.sample, large.states)
        else:
            writer.add(small.sample, small.states)
            fs.fuse = fs.operations + 3  # create, write, sync
            with pytest.raises(StoreError, match="committed samples are safe"):
                writer.commit()
        with pytest.raises(StoreError, match="cannot be written any more: "):
            writer.commit()
        with pytest.raises(StoreError, match="fix: open it again"):
            writer.add(small.sample, small.states)
    assert_holds(path, made + fill(path, range(8, 9)))


def _forget(path: Path, number: int) -> None:
    with sqlite3.connect(path / "index.sqlite") as index:
        index.execute("DELETE FROM samples WHERE shard = ?", (number,))
        index.execute("DELETE FROM shards WHERE number = ?", (number,))
    index.close()


def test_opening_waits_for_nobody(tmp_path: Path) -> None:
    """A reader that holds the index open does not stop a writer's commit, nor the other way round."""
    path = tmp_path / "store"
    fill(path, range(2))
    store = Store(path)
    iterator = iter(store)
    next(iterator)
    fill(path, range(2, 4))  # sqlite would give up after waiting for a lock
    next(iterator)
    store.close()
