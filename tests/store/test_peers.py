"""Ways in which other tools lost data without saying so, tried on ours."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hsdump.errors import StoreBusy, StoreCorrupt
from hsdump.store import Store, StoreWriter, WriterOptions
from hsdump.store.format import shard_path
from hsdump.torch import HiddenStateDataset, Packer
from hsdump.verify import verify_store
from tests.store.making import assert_equal, assert_holds, fill, make_manifest, make_sample


def test_no_padding_is_stored_and_every_true_length_is_known(tmp_path: Path) -> None:
    made = [make_sample(seed, num_tokens=length) for seed, length in enumerate((1, 39, 7, 64))]
    with StoreWriter.open(tmp_path / "store", make_manifest()) as writer:
        for one in made:
            writer.add(one.sample, one.states)
        writer.commit()
    with Store(tmp_path / "store") as store:
        assert store.lengths().tolist() == [1, 39, 7, 64]
        for sample in store:
            shapes = {array.shape[0] for array in (sample.input_ids, sample.loss_mask, *sample.states.values())}
            assert shapes == {sample.num_tokens}


@pytest.mark.parametrize("count", [1, 7, 31, 33])
def test_no_tail_is_dropped_whatever_the_shard_size(tmp_path: Path, count: int) -> None:
    made = fill(tmp_path / "store", range(count), options=WriterOptions(shard_bytes=4000))
    assert_holds(tmp_path / "store", made)


def test_two_processes_cannot_write_one_store(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from hsdump.errors import StoreBusy; from hsdump.store import StoreWriter\n"
        "from tests.store.making import make_manifest\n"
        "try: StoreWriter.open(Path(sys.argv[1]), make_manifest())\n"
        "except StoreBusy: sys.exit(76)"
    )
    with StoreWriter.open(tmp_path / "store", make_manifest()):
        done = subprocess.run([sys.executable, "-c", program, tmp_path / "store"], check=False)
    assert done.returncode == StoreBusy.exit_code


def test_a_truncated_file_is_not_trusted_by_a_resume(tmp_path: Path) -> None:
    made = fill(tmp_path / "store", range(4))
    os.truncate(shard_path(tmp_path / "store", 0), 2000)
    with StoreWriter.open(tmp_path / "store", make_manifest()) as writer:
        assert not any(writer.is_committed(one.sample.key) for one in made)


def test_a_sample_with_nan_does_not_pass_for_done(tmp_path: Path) -> None:
    """The store keeps what it is given, and `verify` ends with 2; who captures decides before."""
    one = make_sample(0)
    states = tuple(state.copy() for state in one.states)
    states[1][0, 3] = 0x7FC0
    with StoreWriter.open(tmp_path / "store", make_manifest()) as writer:
        writer.add(one.sample, states)
        writer.commit()
    report = verify_store(tmp_path / "store")
    assert (report.exit_code, report.counts) == (2, {"not-finite": 1})
    assert (report.findings[0].sample, report.findings[0].layer) == (one.sample.key, "layer4")


def test_an_unreadable_sample_is_an_error_and_never_another_sample(tmp_path: Path) -> None:
    made = fill(tmp_path / "store", range(2)) + fill(tmp_path / "store", range(2, 4))
    shard_path(tmp_path / "store", 1).unlink()
    dataset = HiddenStateDataset(tmp_path / "store")
    with pytest.raises(StoreCorrupt, match=rf"sample {made[3].sample.key} \(row-3\) cannot be read"):
        Packer("bfloat16", ["final"])([dataset[3]])
    assert_equal(dataset.store, made[0])


def test_data_files_run_no_code(tmp_path: Path) -> None:
    """A shard that is a pickle is no shard, and nothing in it is ever called."""

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (os.mkdir, (str(tmp_path / "trapped"),))

    made = fill(tmp_path / "store", range(2))
    shard_path(tmp_path / "store", 0).write_bytes(pickle.dumps([Trap()] * 200))
    (tmp_path / "store" / "index.sqlite").unlink()
    with pytest.raises(StoreCorrupt):
        Store(tmp_path / "store")
    with StoreWriter.open(tmp_path / "store", make_manifest()) as writer:
        assert [event.kind for event in writer.recovered] == ["index-rebuilt", "shard-quarantined"]
    assert not (tmp_path / "trapped").exists()
    assert_holds(tmp_path / "store", fill(tmp_path / "store", range(2)))
    assert np.array_equal(Store(tmp_path / "store")[0].states["final"], made[0].states[-1])
