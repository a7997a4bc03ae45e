"""Damage of every kind is found, named by sample, and repaired without losing what is sound."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

import pytest

from hsdump.errors import StoreError
from hsdump.store import Store, StoreWriter
from hsdump.store.format import shard_path
from hsdump.store.scrub import repair, scrub
from hsdump.verify import verify_store
from tests.store.making import Made, assert_holds, fill, make_manifest


@pytest.fixture
def groups(tmp_path: Path) -> list[list[Made]]:
    return [fill(tmp_path / "store", range(first, first + 3)) for first in (0, 3, 6)]


def test_a_sound_store(tmp_path: Path, groups: list[list[Made]]) -> None:
    report = scrub(tmp_path / "store")
    assert (report.exit_code, report.shards, report.samples, report.damaged) == (0, 3, 9, [])
    assert report.num_bytes == sum(path.stat().st_size for path in (tmp_path / "store" / "shards").iterdir())
    report = repair(tmp_path / "store")
    assert (report.exit_code, report.repaired, report.missing) == (0, False, [])


def test_a_damaged_sample_is_named_and_its_neighbours_are_saved(tmp_path: Path, groups: list[list[Made]]) -> None:
    path = tmp_path / "store"
    bad = groups[1][1]
    _flip(path, bad, "layer4")
    report = scrub(path)
    assert report.exit_code == 2
    (shard,) = report.damaged
    assert (shard.number, shard.sound, shard.problem) == (1, 2, "1 of 3 samples have wrong bytes")
    assert [(sample.key, sample.source, sample.tensors) for sample in shard.samples] == [
        (bad.sample.key, "row-4", ["layer4"])
    ]
    report = repair(path)
    assert (report.exit_code, report.missing) == (1, [bad.sample.key])
    assert_holds(path, [*groups[0], groups[1][0], groups[1][2], *groups[2]])
    assert scrub(path).exit_code == 0
    assert verify_store(path).verdict == "clean"
    assert any(name.name.endswith("-000001.safetensors") for name in (path / "quarantine").iterdir())
    with StoreWriter.open(path, make_manifest()) as writer:
        assert writer.recovered == []
        writer.add(bad.sample, bad.states)
        writer.commit()
    assert scrub(path).exit_code == 0
    with Store(path) as store:
        assert [event.kind for event in store.events()] == ["shard-repaired"]


def test_a_damaged_header_costs_no_sample(tmp_path: Path, groups: list[list[Made]]) -> None:
    path = tmp_path / "store"
    with shard_path(path, 2).open("r+b") as file:
        os.pwrite(file.fileno(), b"!", 300)
    report = scrub(path)
    assert report.exit_code == 2
    assert (report.damaged[0].sound, report.damaged[0].samples) == (3, [])
    assert "its header does not have the checksum" in report.damaged[0].problem
    report = repair(path)
    assert (report.exit_code, report.missing) == (1, [])
    assert_holds(path, list(chain(*groups)))


def test_lost_and_cut_shards(tmp_path: Path, groups: list[list[Made]]) -> None:
    path = tmp_path / "store"
    shard_path(path, 0).unlink()
    os.truncate(shard_path(path, 1), 500)
    report = scrub(path)
    assert [(shard.number, shard.problem) for shard in report.damaged] == [
        (0, "its file is gone"),
        (1, f"it has 500 bytes instead of {_indexed_bytes(path, 1)}"),
    ]
    assert {sample.key for shard in report.damaged for sample in shard.samples} == {
        one.sample.key for one in groups[0] + groups[1]
    }
    report = repair(path)
    assert set(report.missing) == {one.sample.key for one in groups[0] + groups[1]}
    assert_holds(path, groups[2])


def test_a_swapped_pair_loses_nothing_when_the_names_are_set_right(tmp_path: Path, groups: list[list[Made]]) -> None:
    path = tmp_path / "store"
    _swap(path)
    report = scrub(path)
    assert [shard.number for shard in report.damaged] == [0, 1]
    assert {sample.key for shard in report.damaged for sample in shard.samples} <= {
        one.sample.key for one in groups[0] + groups[1]
    }
    _swap(path)
    assert scrub(path).exit_code == 0


def test_there_must_be_a_store(tmp_path: Path) -> None:
    for act in (scrub, repair):
        with pytest.raises(StoreError, match="is not a store"):
            act(tmp_path)


def test_repair_brings_back_manifest_and_index(tmp_path: Path, groups: list[list[Made]]) -> None:
    path = tmp_path / "store"
    (path / "manifest.json").write_bytes(b"[]")
    (path / "index.sqlite").write_bytes(b"x" * 9000)
    report = repair(path)
    assert [event.kind for event in report.recovered][:2] == ["manifest-rebuilt", "index-rebuilt"]
    assert_holds(path, list(chain(*groups)))


def _swap(path: Path) -> None:
    shard_path(path, 0).rename(path / "aside")
    shard_path(path, 1).rename(shard_path(path, 0))
    (path / "aside").rename(shard_path(path, 1))


def _indexed_bytes(path: Path, number: int) -> int:
    with Store(path) as store:
        return store.shards()[number].num_bytes


def _flip(path: Path, one: Made, tensor: str) -> None:
    with Store(path) as store:
        row = store.row(one.sample.key)
    offset = next(entry.offset for entry in row.record.tensors if entry.name == tensor)
    with shard_path(path, row.shard).open("r+b") as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 64]), offset)
