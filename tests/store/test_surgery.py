"""Stores made from stores, and the commands that make them."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsdump.cli.main import main
from hsdump.errors import StoreMismatch, UsageError
from hsdump.samples import TokenSample
from hsdump.store import Store, StoreWriter, WriterOptions
from hsdump.store.surgery import SurgeryOptions, merge, recode, remove, split
from tests.store.faults import Crash, FaultyFs
from tests.store.making import Made, assert_holds, fill, make_manifest, make_sample

DO = SurgeryOptions()


def test_merge_takes_each_sample_once_with_failures_and_skips(tmp_path: Path) -> None:
    one, two, out = (tmp_path / name for name in ("one", "two", "out"))
    made = fill(one, range(5)) + fill(two, range(3, 9))
    with StoreWriter.open(two, make_manifest()) as writer:
        writer.record_failure(make_sample(1).sample, "timeout", "", attempts=2)  # `one` has it
        writer.record_failure(make_sample(50).sample, "nan", "", attempts=2)
        writer.record_skip("f:1", "empty", "")
    dry = merge([one, two], out, SurgeryOptions(dry_run=True))
    assert (dry.samples, dry.already, out.exists()) == ({str(out): 9}, 2, False)
    report = merge([one, two], out, DO)
    assert (report.samples, report.already) == ({str(out): 9}, 2)
    assert_holds(out, list({m.sample.key: m for m in made}.values()))
    with Store(out) as store:
        assert [failure.reason for failure in store.failures().values()] == ["nan"]
        assert store.skips() == {"empty": 1}
    assert merge([one, two], out, DO).already == 11  # again is no harm
    assert len(Store(one)) == 5


def test_merge_refuses_stores_of_two_kinds(tmp_path: Path) -> None:
    fill(tmp_path / "one", range(2))
    fill(tmp_path / "two", range(2), make_manifest(layers=[1, 3], final_state="pre_norm"))
    with pytest.raises(StoreMismatch, match=r"layers: the store has \[2, 4\], two has \[1, 3\]\n.*final_state"):
        merge([tmp_path / "one", tmp_path / "two"], tmp_path / "out", DO)
    assert not (tmp_path / "out").exists()


def test_split_goes_by_tokens_and_seed_alone(tmp_path: Path) -> None:
    made = fill(tmp_path / "store", range(200))
    twin = TokenSample.make("twin", made[0].sample.input_ids, np.ones_like(made[0].sample.loss_mask))
    with StoreWriter.open(tmp_path / "store", make_manifest()) as writer:
        if not writer.is_committed(twin.key):
            writer.add(twin, made[0].states)
            writer.commit()
    shares = {tmp_path / "train": 0.9, tmp_path / "val": 0.1}
    dry = split(tmp_path / "store", shares, SurgeryOptions(dry_run=True))
    report = split(tmp_path / "store", shares, DO)
    assert dry.samples == report.samples
    train, val = (set(Store(path).keys()) for path in shares)
    assert not train & val
    assert train | val == set(Store(tmp_path / "store").keys())
    # 201 samples, each in val with probability 0.1: 20 give or take 4.3; 6 of these happen once in 10^8.
    assert 0 < len(val) < 47
    assert (made[0].sample.key in val) == (twin.key in val)
    fill(tmp_path / "store", range(200, 230))
    split(tmp_path / "store", {tmp_path / "train2": 0.9, tmp_path / "val2": 0.1}, DO)
    assert val <= set(Store(tmp_path / "val2").keys())
    other = split(tmp_path / "store", shares, SurgeryOptions(dry_run=True), seed=1)
    assert sum(other.samples.values()) == 231
    with pytest.raises(UsageError, match="do not add up to 1"):
        split(tmp_path / "store", {tmp_path / "a": 0.5}, DO)


def test_removed_samples_are_gone_and_can_be_captured_again(tmp_path: Path) -> None:
    path = tmp_path / "store"
    groups = [fill(path, range(first, first + 3)) for first in (0, 3, 6)]
    gone = [groups[0][1], *groups[1]]
    keys = [one.sample.key for one in gone]
    assert remove(path, keys, SurgeryOptions(dry_run=True)).samples == {str(path): 4}
    assert len(Store(path)) == 9
    with pytest.raises(UsageError, match="has no sample nonsense"):
        remove(path, ["nonsense", *keys], DO)
    remove(path, keys, DO)
    left = [one for one in chain(*groups) if one not in gone]
    assert_holds(path, left)
    assert list((path / "quarantine").iterdir()) == []
    data = b"".join(shard.read_bytes() for shard in (path / "shards").iterdir())
    assert not any(key.encode() in data for key in keys)
    (path / "index.sqlite").unlink()
    with StoreWriter.open(path, make_manifest()) as writer:  # not even then do they come back
        for one in gone:
            writer.add(one.sample, one.states)
        writer.commit()
    assert_holds(path, left + gone)


def test_dying_while_samples_are_removed_loses_no_other(tmp_path: Path) -> None:
    fuse, survived = 0, False
    while not survived:
        fuse += 1
        path = tmp_path / f"store{fuse}"
        made = fill(path, range(4))
        fs = FaultyFs(fuse, seed=fuse)
        try:
            remove(path, [made[2].sample.key], SurgeryOptions(writer=WriterOptions(fs=fs)))
            survived = True
        except Crash:
            fs.lose_power()
        StoreWriter.open(path, make_manifest()).close()
        left = [one for one in made if one is not made[2]]
        keys = Store(path).keys()
        assert_holds(path, made if made[2].sample.key in keys else left)
        assert not survived or made[2].sample.key not in keys
    assert fuse > 12


@pytest.mark.parametrize("codec", ["blosc2", "fp8"])
def test_recode_proves_what_it_wrote(tmp_path: Path, codec: str) -> None:
    manifest = make_manifest(hidden_size=64)
    made = fill(tmp_path / "store", range(6), manifest)
    assert recode(tmp_path / "store", tmp_path / "out", codec, SurgeryOptions(dry_run=True)).samples == {
        str(tmp_path / "out"): 6
    }
    report = recode(tmp_path / "store", tmp_path / "out", codec, DO)
    assert report.samples == {str(tmp_path / "out"): 6}
    with Store(tmp_path / "out") as store:
        assert store.manifest.codec == codec
    if codec == "blosc2":
        assert set(report.errors.values()) == {0.0}
        assert_holds(tmp_path / "out", made)
    else:
        assert all(0 < error < 0.04 for error in report.errors.values())
        with pytest.raises(UsageError, match="has the codec fp8"):
            recode(tmp_path / "out", tmp_path / "back", "raw", DO)
    with pytest.raises(UsageError, match="has the codec raw\n  fix: nothing to do"):
        recode(tmp_path / "store", tmp_path / "again", "raw", DO)


def test_recode_in_place_of_the_source(tmp_path: Path) -> None:
    made = fill(tmp_path / "store", range(6))
    recode(tmp_path / "store", tmp_path / "out", "blosc2", DO, replace=True)
    assert Store(tmp_path / "store").manifest.codec == "blosc2"
    assert_holds(tmp_path / "store", made)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def run(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    """Run a command with --json, and give what it printed."""
    assert main(["store", *map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "store"
    made: list[Made] = fill(path, range(12))
    with StoreWriter.open(path, make_manifest()) as writer:
        writer.record_failure(make_sample(99).sample, "timeout", "120 s", attempts=5)
    info = run(capsys, "info", path)
    assert (info["samples"], info["failures"], info["raw_bytes_per_token"]) == (12, {"timeout": 1}, 48)
    assert info["coverage"] == pytest.approx(12 / 13)
    rows = run(capsys, "ls", path, "--limit", 5)
    assert (rows["total"], [row["source"] for row in rows["rows"]]) == (12, [f"row-{i}" for i in range(5)])
    assert run(capsys, "ls", path, "--failed")["rows"][0]["reason"] == "timeout"
    key = made[3].sample.key
    shown = run(capsys, "show", key[:10], "--store", path)
    assert (shown["key"], shown["tokens"]) == (key, len(made[3].sample.input_ids))
    assert shown == run(capsys, "show", 3, "--store", path)
    assert run(capsys, "scrub", path)["samples"] == 12
    out = tmp_path / "merged"
    assert run(capsys, "merge", path, "--out", out, "--dry-run")["samples"] == {str(out): 12}
    assert run(capsys, "merge", path, "--out", out)["samples"] == {str(out): 12}
    parts = ["--out", tmp_path / "a", "--out", tmp_path / "b", "--shares", "0.5,0.5"]
    assert sum(run(capsys, "split", path, *parts)["samples"].values()) == 12
    assert run(capsys, "rm", key, "--store", out)["samples"] == {str(out): 1}
    assert run(capsys, "recode", path, "--codec", "blosc2", "--out", tmp_path / "small")["samples"]
    for words in (["info", path], ["ls", path], ["show", "0", "--store", path], ["scrub", path]):
        assert main(["store", *map(str, words)]) == 0
        assert "row-0" in capsys.readouterr().out or words[0] in {"info", "scrub"}


def test_what_the_commands_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "store", range(3))
    refused = {
        ("info", tmp_path / "none"): (74, "no "),
        ("show", "zz", "--store", tmp_path / "store"): (64, "0 samples begin with 'zz'"),
        ("show", "7", "--store", tmp_path / "store"): (64, "there is no sample 7"),
        ("split", tmp_path / "store", "--out", tmp_path / "a", "--shares", "x"): (64, "are not numbers"),
        ("split", tmp_path / "store", "--out", tmp_path / "a", "--shares", "0.5,0.5"): (64, "2 shares for 1 stores"),
        ("recode", tmp_path / "store", "--out", tmp_path / "a", "--codec", "zip"): (64, "codec 'zip' is not known"),
        ("export", tmp_path / "store", "--to", "gguf", "--out", tmp_path / "a"): (64, "--to gguf is not known"),
    }
    for words, (code, text) in refused.items():
        assert main(["store", *map(str, words)]) == code, words
        assert text in capsys.readouterr().err
