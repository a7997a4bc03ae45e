"""A verification that can fail: each way in which a store can be wrong is made by hand and must be found by name."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hsdump.cli.main import main
from hsdump.errors import StoreError
from hsdump.samples import TokenSample
from hsdump.store import Store, StoreWriter, WriterOptions
from hsdump.store.format import shard_path
from hsdump.verify import Finding, Report, VerifyOptions, verify_store
from hsdump.verify.norms import NormHistogram
from hsdump.verify.proof_file import PROOF_NAME, store_digest
from tests.store.making import VOCAB, Made, fill, make_manifest, make_sample

LENGTH = 24


def bits(value: float) -> int:
    """bfloat16 bits of a number that it can hold."""
    return int(np.float32(value).view(np.uint32)) >> 16


def store_with(path: Path, change: Callable[[Made], Made], num_samples: int = 12) -> Made:
    """Commit samples of which the sixth was changed; gives that one."""
    made = [make_sample(seed, num_tokens=LENGTH) for seed in range(num_samples)]
    made[5] = change(made[5])
    with StoreWriter.open(path, make_manifest()) as writer:
        for one in made:
            writer.add(one.sample, one.states)
        writer.commit()
    return made[5]


def with_rows(layer: int, rows: slice, value: float) -> Callable[[Made], Made]:
    def change(made: Made) -> Made:
        states = [state.copy() for state in made.states]
        states[layer][rows] = bits(value)
        return Made(made.sample, tuple(states))

    return change


def only_finding(report: Report) -> Finding:
    assert len(report.findings) == 1, report.findings
    assert sum(report.counts.values()) == 1
    return report.findings[0]


def test_a_store_without_a_sample_is_suspicious(tmp_path: Path) -> None:
    fill(tmp_path / "store", range(0))
    report = verify_store(tmp_path / "store")
    assert (only_finding(report).check, report.exit_code) == ("no-samples", 1)


def test_a_proof_is_worth_nothing_once_the_store_holds_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "store"
    fill(path, range(3))
    assert verify_store(path).proof == "none"
    with Store(path) as store:
        digests = {"store_digest": store_digest(store), "manifest_digest": store.manifest.digest}
    (path / PROOF_NAME).write_text(json.dumps({"verdict": "proved", "of_samples": 3, **digests}))
    assert verify_store(path).proof == "proved"
    fill(path, range(3, 5))
    assert main(["verify", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "outdated: proved when the store held 3 samples, and it has changed since; prove it again" in shown
    (path / PROOF_NAME).write_text("{")
    assert verify_store(path).proof.startswith("unreadable: ")


def test_a_sound_store_is_clean(tmp_path: Path) -> None:
    made = fill(tmp_path / "store", range(30))
    report = verify_store(tmp_path / "store")
    assert (report.verdict, report.exit_code, report.findings) == ("clean", 0, [])
    assert report.samples == 30
    assert report.tokens == sum(len(one.sample.input_ids) for one in made)
    assert report.learned_tokens == sum(int(one.sample.loss_mask.sum()) for one in made)
    assert [layer.layer for layer in report.layers] == ["layer2", "layer4", "final"]
    # Norms of 8 standard normal numbers are chi(8): median 2.71. A histogram bin is 4.4 % wide, 600 rows scatter 1 %.
    assert all(layer.norm_min <= layer.norm_median <= layer.norm_p99 <= layer.norm_max for layer in report.layers)
    assert all(layer.norm_median == pytest.approx(2.71, rel=0.08) for layer in report.layers)


@pytest.mark.parametrize(
    ("layer", "rows", "value", "check", "exit_code"),
    [
        (0, slice(7, 8), float("nan"), "not-finite", 2),
        (2, slice(7, 10), float("inf"), "not-finite", 2),
        (1, slice(7, 9), 0.0, "zero-row", 1),
        (1, slice(7, 8), 1.5, "constant-row", 1),
    ],
)
def test_rows_that_no_model_leaves_are_named(
    tmp_path: Path, layer: int, rows: slice, value: float, check: str, exit_code: int
) -> None:
    bad = store_with(tmp_path / "store", with_rows(layer, rows, value))
    report = verify_store(tmp_path / "store")
    assert report.exit_code == exit_code
    finding = only_finding(report)
    assert (finding.check, finding.sample, finding.source) == (check, bad.sample.key, "row-5")
    assert (finding.layer, finding.token) == (("layer2", "layer4", "final")[layer], 7)
    assert finding.rows == rows.stop - rows.start


@pytest.mark.parametrize(("factor", "check"), [(2.0**-12, "norm-drop"), (2.0**16, "norm-peak")])
def test_a_row_of_another_size_stands_out(tmp_path: Path, factor: float, check: str) -> None:
    def change(made: Made) -> Made:
        states = [state.copy() for state in made.states]
        wide = (states[1][11].astype(np.uint32) << 16).view(np.float32) * np.float32(factor)
        states[1][11] = wide.view(np.uint32) >> 16
        return Made(made.sample, tuple(states))

    store_with(tmp_path / "store", change)
    report = verify_store(tmp_path / "store")
    finding = only_finding(report)
    assert (finding.check, finding.layer, finding.token, report.exit_code) == (check, "layer4", 11, 1)


def test_a_whole_sample_of_another_size_stands_out(tmp_path: Path) -> None:
    def change(made: Made) -> Made:
        return Made(made.sample, (*made.states[:2], (made.states[2] + (8 << 7)).astype(np.uint16)))  # times 2**8

    bad = store_with(tmp_path / "store", change)
    finding = only_finding(verify_store(tmp_path / "store"))
    assert (finding.check, finding.sample, finding.layer) == ("norm-of-sample", bad.sample.key, "final")


def test_a_buffer_that_was_not_filled_repeats_a_row(tmp_path: Path) -> None:
    def change(made: Made) -> Made:
        states = [state.copy() for state in made.states]
        states[0][13] = states[0][12]
        return Made(made.sample, tuple(states))

    store_with(tmp_path / "store", change)
    finding = only_finding(verify_store(tmp_path / "store"))
    assert (finding.check, finding.layer, finding.token) == ("repeated-row", "layer2", 13)


def test_one_layer_stored_under_two_names(tmp_path: Path) -> None:
    store_with(tmp_path / "store", lambda made: Made(made.sample, (made.states[0], made.states[0], made.states[2])))
    finding = only_finding(verify_store(tmp_path / "store"))
    assert (finding.check, finding.layer, finding.detail) == ("layers-equal", "layer4", "the same bytes as layer2")


def _remade(made: Made, ids: np.ndarray, mask: np.ndarray) -> Made:
    return Made(TokenSample.make(made.sample.source, ids, mask), made.states)


def test_tokens_outside_the_vocabulary(tmp_path: Path) -> None:
    def change(made: Made) -> Made:
        ids = made.sample.input_ids.copy()
        ids[3] = VOCAB
        return _remade(made, ids, made.sample.loss_mask)

    store_with(tmp_path / "store", change)
    report = verify_store(tmp_path / "store")
    finding = only_finding(report)
    assert (finding.check, finding.token, report.exit_code) == ("token-id", 3, 2)
    assert finding.detail == f"token id {VOCAB} is outside the vocabulary of {VOCAB}"


def test_masks_that_teach_nothing_or_hold_nonsense(tmp_path: Path) -> None:
    store_with(
        tmp_path / "empty", lambda made: _remade(made, made.sample.input_ids, np.zeros_like(made.sample.loss_mask))
    )
    report = verify_store(tmp_path / "empty")
    assert (only_finding(report).check, report.exit_code) == ("mask-empty", 1)
    store_with(
        tmp_path / "two", lambda made: _remade(made, made.sample.input_ids, np.full_like(made.sample.loss_mask, 2))
    )
    report = verify_store(tmp_path / "two")
    assert (only_finding(report).check, report.exit_code) == ("mask-value", 2)


def test_a_key_that_is_not_the_contents(tmp_path: Path) -> None:
    """States filed under another sample's key: every byte is as committed, and still it is wrong."""

    def change(made: Made) -> Made:
        other = TokenSample(
            key="ab" * 16,
            source=made.sample.source,
            input_ids=made.sample.input_ids,
            loss_mask=made.sample.loss_mask,
        )
        return Made(other, made.states)

    store_with(tmp_path / "store", change)
    report = verify_store(tmp_path / "store")
    assert (only_finding(report).check, report.exit_code) == ("key", 2)


def test_the_same_tokens_under_two_masks(tmp_path: Path) -> None:
    one = make_sample(1, num_tokens=LENGTH)
    other = _remade(one, one.sample.input_ids, np.ones_like(one.sample.loss_mask))
    with StoreWriter.open(tmp_path / "store", make_manifest()) as writer:
        for made in (one, other):
            writer.add(made.sample, made.states)
        writer.commit()
    report = verify_store(tmp_path / "store")
    finding = only_finding(report)
    assert (finding.check, finding.sample, report.exit_code) == ("duplicate-tokens", other.sample.key, 1)
    assert one.sample.key in finding.detail


def test_a_sample_longer_than_the_capture_allowed(tmp_path: Path) -> None:
    one = make_sample(1, num_tokens=LENGTH)
    with StoreWriter.open(tmp_path / "store", make_manifest(max_tokens=LENGTH - 1)) as writer:
        writer.add(one.sample, one.states)
        writer.commit()
    assert only_finding(verify_store(tmp_path / "store")).check == "too-long"


def test_a_flipped_bit_is_named_by_sample_and_layer(tmp_path: Path) -> None:
    made = fill(tmp_path / "store", range(6))
    key = made[3].sample.key
    with Store(tmp_path / "store") as store:
        place = next(entry for entry in store.row(key).record.tensors if entry.name == "final")
    _flip(shard_path(tmp_path / "store", 0), place.offset + 5)
    report = verify_store(tmp_path / "store")
    found = [finding for finding in report.findings if finding.check == "checksum"]
    assert [(finding.sample, finding.layer, finding.shard) for finding in found] == [
        (key, "final", "000000.safetensors")
    ]
    assert report.exit_code == 2


def test_a_flipped_bit_in_a_header_and_in_a_pad(tmp_path: Path) -> None:
    fill(tmp_path / "store", range(6))
    path = shard_path(tmp_path / "store", 0)
    _flip(path, 400)
    report = verify_store(tmp_path / "store")
    assert report.counts == {"shard-damaged": 6}
    _flip(path, 400)
    _flip(path, path.stat().st_size - 1)
    finding = only_finding(verify_store(tmp_path / "store"))
    assert "padding at byte" in finding.detail


def test_shards_gone_cut_swapped_and_unknown(tmp_path: Path) -> None:
    root = tmp_path / "store"
    for first in (0, 10, 20):
        fill(root, range(first, first + 3))
    paths = [shard_path(root, number) for number in range(3)]

    kept = paths[1].read_bytes()
    paths[1].unlink()
    assert verify_store(root).counts == {"shard-missing": 3}
    paths[1].write_bytes(kept[:-64])
    assert verify_store(root).counts == {"shard-damaged": 3}
    paths[1].write_bytes(kept)
    assert verify_store(root).exit_code == 0

    paths[0].rename(root / "aside")
    paths[2].rename(paths[0])
    (root / "aside").rename(paths[2])
    report = verify_store(root)
    assert report.counts == {"shard-damaged": 6}
    assert "is shard 2 under another name" in report.findings[0].detail
    paths[0].rename(root / "aside")
    paths[2].rename(paths[0])
    (root / "aside").rename(paths[2])

    with sqlite3.connect(root / "index.sqlite") as index:
        index.execute("DELETE FROM samples WHERE shard = 2")
        index.execute("DELETE FROM shards WHERE number = 2")
    index.close()
    report = verify_store(root)
    assert (report.counts, report.exit_code) == ({"shard-not-indexed": 1}, 1)
    with StoreWriter.open(root, make_manifest()):
        assert verify_store(root).exit_code == 0  # adopted


def test_an_index_that_disagrees_with_its_shard(tmp_path: Path) -> None:
    made = fill(tmp_path / "store", range(4))
    key = made[2].sample.key
    with sqlite3.connect(tmp_path / "store" / "index.sqlite") as index:
        index.execute("UPDATE samples SET source = 'other' WHERE key = ?", (key,))
    index.close()
    report = verify_store(tmp_path / "store")
    assert (only_finding(report).sample, report.exit_code) == (key, 2)
    with sqlite3.connect(tmp_path / "store" / "index.sqlite") as index:
        index.execute("DELETE FROM samples WHERE key = ?", (key,))
    index.close()
    report = verify_store(tmp_path / "store")
    assert report.counts == {"shard-disagrees": 1}


def test_a_missing_index_is_read_from_the_shards(tmp_path: Path) -> None:
    fill(tmp_path / "store", range(4))
    (tmp_path / "store" / "index.sqlite").unlink()
    report = verify_store(tmp_path / "store")
    assert (report.counts, report.samples, report.exit_code) == ({"index-missing": 1}, 4, 1)


def test_damaged_manifest_and_index_are_corrupt_and_no_store_is_an_error(tmp_path: Path) -> None:
    fill(tmp_path / "store", range(2))
    shutil.copytree(tmp_path / "store", tmp_path / "other")
    (tmp_path / "store" / "manifest.json").write_bytes(b"{")
    report = verify_store(tmp_path / "store")
    assert (report.counts, report.exit_code) == ({"manifest": 1}, 2)
    (tmp_path / "other" / "index.sqlite").write_bytes(b"no database at all" * 100)
    report = verify_store(tmp_path / "other")
    assert (report.counts, report.exit_code) == ({"index": 1}, 2)
    with pytest.raises(StoreError, match="is not a store"):
        verify_store(tmp_path)


def test_rows_of_one_size_have_a_median_within_what_was_seen() -> None:
    histogram = NormHistogram()
    histogram.add(np.full(100, 16.02, np.float32))
    summary = histogram.summary("final")
    assert summary.norm_min == summary.norm_median == summary.norm_p99 == summary.norm_max == np.float32(16.02)


def test_a_report_stays_small_and_counts_everything(tmp_path: Path) -> None:
    made = [make_sample(seed, num_tokens=8) for seed in range(120)]
    with StoreWriter.open(tmp_path / "store", make_manifest()) as writer:
        for one in made:
            bad = one.states[0].copy()
            bad[2] = bits(float("nan"))
            writer.add(one.sample, (bad, *one.states[1:]))
        writer.commit()
    report = verify_store(tmp_path / "store")
    assert report.counts == {"not-finite": 120}
    assert len(report.findings) == 50


def test_a_sampled_verification_says_so(tmp_path: Path) -> None:
    fill(tmp_path / "store", range(20), options=WriterOptions(shard_bytes=2000))
    report = verify_store(tmp_path / "store", VerifyOptions(sample=5, seed=1))
    assert report.samples == 5
    assert report.sampled is not None
    assert (report.sampled.checked, report.sampled.of) == (5, 20)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_with(tmp_path / "bad", with_rows(0, slice(3, 4), float("nan")))
    fill(tmp_path / "good", range(20))
    assert main(["verify", str(tmp_path / "good"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["verdict"], data["samples"], data["findings"]) == ("clean", 20, [])
    assert main(["verify", str(tmp_path / "bad")]) == 2
    text = capsys.readouterr().out
    assert "corrupt" in text
    assert "not-finite" in text
    assert main(["verify", str(tmp_path / "good"), "--sample", "4"]) == 0
    assert "only 4 of 20 samples" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "nothing")]) == 74
    assert "fix: name the folder" in capsys.readouterr().err
    assert main(["verify"]) == 64


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), offset)
