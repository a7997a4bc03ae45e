"""Writes past the page cache: the same bytes, on disks that have such writes and on those that do not."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsdump.store import Store, StoreWriter, WriterOptions, past_cache
from hsdump.store.format import SHARDS_FOLDER
from hsdump.store.fs import Fs
from hsdump.store.past_cache import PastCache
from tests.store.making import assert_holds, make_manifest, make_sample

BLOCK = 4096


class Disk(Fs):
    """Takes direct writes, or refuses them: when it is asked, or at one of the writes, after a part of it."""

    def __init__(self, refuses: str = "", at: int = 0, part: int = 0) -> None:
        self.refuses, self.at, self.part = refuses, at, part
        self.direct, self.direct_writes = False, 0

    def set_direct(self, fd: int, *, on: bool) -> bool:
        self.direct = on and self.refuses != "flag"
        return self.refuses != "flag"

    def write_at(self, fd: int, data: Any, offset: int) -> None:
        if self.direct:
            assert offset % BLOCK == len(data) % BLOCK == 0
            assert np.frombuffer(data, dtype=np.uint8).ctypes.data % 512 == 0
            self.direct_writes += 1
            if self.refuses == "write" and self.direct_writes == self.at:
                super().write_at(fd, data[: self.part], offset)
                raise OSError(errno.EINVAL, "no such writes")
        super().write_at(fd, data, offset)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_cache, "BLOCK_BYTES", BLOCK)


@pytest.mark.parametrize(
    ("disk", "direct_writes"),
    [
        (Disk(), 12),
        (Disk("flag"), 0),
        (Disk("write", at=1), 1),
        (Disk("write", at=5, part=1000), 5),
    ],
    ids=["takes them", "refuses the flag", "refuses the first", "refuses a later one"],
)
def test_bytes_come_out_as_they_went_in(tmp_path: Path, disk: Disk, direct_writes: int) -> None:
    rng = random.Random(1)
    parts = [rng.randbytes(size) for size in (0, 1, BLOCK, 63, 3 * BLOCK + 5, BLOCK - 69, 7, 7 * BLOCK, 11)]
    fd = disk.create(tmp_path / "file")
    out = PastCache(disk, fd)
    for part in parts:
        out.write(np.frombuffer(part, dtype=np.uint8) if len(part) % 2 else part)
    out.end()
    assert not disk.direct
    disk.write_at(fd, b"head", 0)
    disk.close(fd)
    expected = b"".join(parts)
    assert (tmp_path / "file").read_bytes() == b"head" + expected[4:]
    assert disk.direct_writes == direct_writes


@pytest.mark.parametrize("left", [0, 1])
def test_a_file_that_ends_at_a_block_gets_nothing_more(tmp_path: Path, left: int) -> None:
    disk = Disk()
    fd = disk.create(tmp_path / "file")
    out = PastCache(disk, fd)
    out.write(bytes(2 * BLOCK + left))
    out.end()
    disk.close(fd)
    assert (tmp_path / "file").stat().st_size == 2 * BLOCK + left


def test_another_error_of_the_disk_is_no_reason_to_try_again(tmp_path: Path) -> None:
    class Full(Disk):
        def write_at(self, fd: int, data: Any, offset: int) -> None:
            raise OSError(errno.ENOSPC, "full")

    disk = Full()
    fd = disk.create(tmp_path / "file")
    out = PastCache(disk, fd)
    with pytest.raises(OSError, match="full"):
        out.write(bytes(BLOCK))
    disk.close(fd)


class Counting(Fs):
    """Counts writes that really go past the page cache."""

    def __init__(self) -> None:
        self.direct_writes = 0

    def write_at(self, fd: int, data: Any, offset: int) -> None:
        super().write_at(fd, data, offset)
        self.direct_writes += bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def test_the_real_file_system_has_the_same_store_either_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_cache, "BLOCK_BYTES", 1 << 20)
    manifest = make_manifest(hidden_size=512)
    made = [make_sample(seed, manifest, num_tokens=900) for seed in range(8)]
    disks = {"cached": Counting(), "direct": Counting()}
    for name, disk in disks.items():
        options = WriterOptions(shard_bytes=12 << 20, direct=name == "direct", fs=disk)
        with StoreWriter.open(tmp_path / name, manifest, options=options) as writer:
            for one in made:
                assert writer.begin_add(writer.encode(one.sample, one.states)).result(60)
            writer.commit()
        assert_holds(tmp_path / name, made)
    shards = sorted((tmp_path / "cached" / SHARDS_FOLDER).iterdir())
    assert len(shards) == 2
    for shard in shards:
        assert shard.read_bytes() == (tmp_path / "direct" / SHARDS_FOLDER / shard.name).read_bytes()
    with Store(tmp_path / "direct", check=True) as store:
        assert len(store) == 8
    assert disks["cached"].direct_writes == 0
    assert disks["direct"].direct_writes == (20 if has_direct_writes(tmp_path) else 0)


def has_direct_writes(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "asked", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    return True
