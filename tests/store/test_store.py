"""What a store promises when nothing goes wrong, and what it refuses."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from hsdump.errors import StoreBusy, StoreCorrupt, StoreError, StoreMismatch, UsageError
from hsdump.samples import TokenSample
from hsdump.store import Store, StoreWriter, WriterOptions
from hsdump.store.format import shard_path
from hsdump.store.index import Index
from tests.store.faults import FaultyFs
from tests.store.making import assert_equal, assert_holds, fill, make_manifest, make_sample


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_was_committed_is_read_back_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    manifest = make_manifest(dtype=dtype)
    made = fill(tmp_path / "store", range(20), manifest)
    assert_holds(tmp_path / "store", made)


def test_commit_gives_the_keys_in_order_and_nothing_counts_before(tmp_path: Path) -> None:
    made = [make_sample(seed) for seed in range(3)]
    with StoreWriter.open(tmp_path / "store", make_manifest()) as writer:
        for one in made:
            writer.add(one.sample, one.states)
            assert not writer.is_committed(one.sample.key)
        assert writer.pending_bytes > 0
        assert len(Store(tmp_path / "store")) == 0
        assert writer.commit() == [one.sample.key for one in made]
        assert writer.pending_bytes == 0
        assert writer.commit() == []
        assert all(writer.is_committed(one.sample.key) for one in made)
        assert Store(tmp_path / "store").keys() == [one.sample.key for one in made]


def test_the_next_shard_fills_while_a_second_thread_commits(tmp_path: Path) -> None:
    first, second = [make_sample(seed) for seed in range(3)], [make_sample(seed) for seed in range(3, 6)]
    fs = FaultyFs()
    with StoreWriter.open(tmp_path / "store", make_manifest(), options=WriterOptions(fs=fs)) as writer:
        for one in first:
            writer.add(one.sample, one.states)
        fs.gate.clear()  # the disk is slow
        commit = writer.begin_commit()
        for one in second:
            assert writer.add(one.sample, one.states)
        assert not any(writer.add(one.sample, one.states) for one in first)  # on their way
        writer.record_failure(first[0].sample, "timeout", "", attempts=1)
        assert not commit.done()
        assert len(Store(tmp_path / "store")) == 0
        fs.gate.set()
        assert commit.result(60) == [one.sample.key for one in first]
        assert_holds(tmp_path / "store", first)
        assert writer.failures() == {}
        assert writer.begin_commit().result(60) == [one.sample.key for one in second]
    assert_holds(tmp_path / "store", first + second)


def test_a_commit_that_fails_in_the_second_thread_is_never_taken_for_done(tmp_path: Path) -> None:
    made, fs = [make_sample(seed) for seed in range(3)], FaultyFs(kind="error")
    writer = StoreWriter.open(tmp_path / "store", make_manifest(), options=WriterOptions(fs=fs))
    writer.add(made[0].sample, made[0].states)
    fs.fuse = fs.operations + 1
    commit = writer.begin_commit()
    with pytest.raises(StoreError, match="the test's disk"):
        commit.result(60)
    with pytest.raises(StoreError, match="cannot be written any more"):
        writer.add(made[1].sample, made[1].states)
    with pytest.raises(StoreError, match="the test's disk"):
        writer.close()  # nobody asked the store since
    with StoreWriter.open(tmp_path / "store", make_manifest()) as writer:
        assert not writer.is_committed(made[0].sample.key)


def test_what_was_added_and_not_committed_is_gone_after_close(tmp_path: Path) -> None:
    one = make_sample(1)
    with StoreWriter.open(tmp_path / "store", make_manifest()) as writer:
        writer.add(one.sample, one.states)
    assert_holds(tmp_path / "store", [])
    assert list((tmp_path / "store" / "shards").iterdir()) == []


def test_equal_content_is_one_sample(tmp_path: Path) -> None:
    one, other = make_sample(1), make_sample(1)
    with StoreWriter.open(tmp_path / "store", make_manifest()) as writer:
        assert writer.add(one.sample, one.states)
        assert not writer.add(other.sample, other.states)  # waits for its commit
        assert writer.commit() == [one.sample.key]
        assert not writer.add(other.sample, other.states)  # is committed
        assert writer.commit() == []
    assert_holds(tmp_path / "store", [one])


def test_states_may_be_overwritten_as_soon_as_add_returned(tmp_path: Path) -> None:
    one = make_sample(1)
    with StoreWriter.open(tmp_path / "store", make_manifest()) as writer:
        shared = tuple(state.copy() for state in one.states)
        writer.add(one.sample, shared)
        for state in shared:
            state[:] = 0
        writer.commit()
    assert_holds(tmp_path / "store", [one])


def test_resume_goes_on_behind_what_is_there(tmp_path: Path) -> None:
    first = fill(tmp_path / "store", range(5))
    second = fill(tmp_path / "store", range(5, 9))
    assert_holds(tmp_path / "store", first + second)
    assert len(list((tmp_path / "store" / "shards").iterdir())) == 2


def test_a_batch_larger_than_a_shard_becomes_several_and_all_are_streamed(tmp_path: Path) -> None:
    manifest = make_manifest(hidden_size=4096)  # 24 kB a token: beyond the part that is kept in memory
    made = [make_sample(seed, manifest, num_tokens=100 + seed) for seed in range(12)]
    with StoreWriter.open(tmp_path / "store", manifest, options=WriterOptions(shard_bytes=6 << 20)) as writer:
        for one in made:
            writer.add(one.sample, one.states)
        assert writer.is_full
        assert writer.commit() == [one.sample.key for one in made]
    assert_holds(tmp_path / "store", made)
    assert len(list((tmp_path / "store" / "shards").iterdir())) > 3


def test_a_shard_is_plain_safetensors_with_every_tensor_on_64_bytes(tmp_path: Path) -> None:
    made = fill(tmp_path / "store", range(7))
    path = shard_path(tmp_path / "store", 0)
    with safe_open(path, "np") as file:
        names = set(file.keys())
        for one in made:
            np.testing.assert_array_equal(file.get_tensor(f"{one.sample.key}/input_ids"), one.sample.input_ids)
    assert {f"{made[0].sample.key}/{name}" for name in ("layer2", "layer4", "final", "input_ids", "loss_mask")} < names
    with Store(tmp_path / "store") as store:
        offsets = [entry.offset for one in made for entry in store.row(one.sample.key).record.tensors]
    assert all(offset % 64 == 0 for offset in offsets)


def test_raw_states_are_read_without_a_copy(tmp_path: Path) -> None:
    made = fill(tmp_path / "store", range(2))
    with Store(tmp_path / "store") as store:
        found = store[made[1].sample.key]
    state = found.states["final"]
    assert not state.flags.owndata
    assert not state.flags.writeable
    np.testing.assert_array_equal(state, made[1].states[-1])  # after close, too


def test_access_by_position_key_iteration_and_membership(tmp_path: Path) -> None:
    made = fill(tmp_path / "store", range(4))
    with Store(tmp_path / "store") as store:
        assert len(store) == 4
        assert [sample.key for sample in store] == store.keys() == [one.sample.key for one in made]
        assert store[-1].key == made[-1].sample.key
        assert made[0].sample.key in store
        assert "nothing" not in store
        with pytest.raises(KeyError, match="nothing"):
            store["nothing"]
        with pytest.raises(IndexError):
            store[4]


def test_a_reader_keeps_its_view_until_it_refreshes(tmp_path: Path) -> None:
    first = fill(tmp_path / "store", range(2))
    with Store(tmp_path / "store") as store:
        second = fill(tmp_path / "store", range(2, 4))
        assert len(store) == 2
        assert store.keys() == [one.sample.key for one in first]
        assert second[0].sample.key not in store
        store.refresh()
        assert_equal(store, second[0])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # that a fork is survived is the point
def test_a_store_travels_by_pickle_and_survives_a_fork(tmp_path: Path) -> None:
    made = fill(tmp_path / "store", range(3))
    store = Store(tmp_path / "store")
    assert_equal(store, made[0])
    assert_equal(pickle.loads(pickle.dumps(store)), made[1])  # noqa: S301 - made a line before
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_Sum(store), range(3)) == [int(one.states[0].sum()) for one in made]


class _Sum:
    def __init__(self, store: Store) -> None:
        self._store = store

    def __call__(self, position: int) -> int:
        return int(self._store[position].states["layer2"].sum())

    def __getstate__(self) -> dict[str, object]:
        return {"_store": self._store}


def test_failures_are_kept_until_a_success_replaces_them(tmp_path: Path) -> None:
    one, other = make_sample(1), make_sample(2)
    with StoreWriter.open(tmp_path / "store", make_manifest()) as writer:
        writer.record_failure(one.sample, "timeout", "120 s", attempts=5)
        writer.record_failure(other.sample, "nan", "layer2", attempts=1)
        with Store(tmp_path / "store") as store:  # durable on return
            assert {key: failure.reason for key, failure in store.failures().items()} == {
                one.sample.key: "timeout",
                other.sample.key: "nan",
            }
    with StoreWriter.open(tmp_path / "store", make_manifest()) as writer:
        assert writer.failures()[one.sample.key].attempts == 5
        writer.add(one.sample, one.states)
        writer.commit()
        writer.record_failure(one.sample, "late", "never replaces a success", attempts=1)
        assert list(writer.failures()) == [other.sample.key]


def test_a_row_that_is_skipped_again_counts_once(tmp_path: Path) -> None:
    for _ in range(2):
        with StoreWriter.open(tmp_path / "store", make_manifest()) as writer:
            writer.record_skip("chats.jsonl:7", "empty", "no messages")
            writer.record_skip("chats.jsonl:9", "too-long", "5000 tokens")
            writer.record_skip("chats.jsonl:11", "empty", "no messages")
    with Store(tmp_path / "store") as store:
        assert store.skips() == {"empty": 2, "too-long": 1}
        assert [row.source for row in store.skipped_rows()] == ["chats.jsonl:11", "chats.jsonl:7", "chats.jsonl:9"]


def test_a_resume_with_other_facts_is_refused_with_all_differences(tmp_path: Path) -> None:
    fill(tmp_path / "store", range(1))
    changes = {
        "layers": [2, 5],
        "model_digest": "f" * 32,
        "tokenizer_digest": "e" * 32,
        "template_digest": "d" * 32,
        "dtype": "float16",
        "final_state": "pre_norm",
        "engine_version": "0.5.11",
        "max_tokens": 1,
    }
    with pytest.raises(StoreMismatch, match=r"layers: the store has \[2, 4\], this run has \[2, 5\]") as caught:
        StoreWriter.open(tmp_path / "store", make_manifest(**changes))
    assert all(f"{name}: the store has" in caught.value.what for name in changes)
    fill(tmp_path / "store", range(1, 2), make_manifest(model_path="moved", notes=["new"]))  # these only inform


def test_a_second_writer_is_refused_by_pid(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "store", make_manifest()):
        with pytest.raises(StoreBusy, match=f"written by process {os.getpid()} on"):
            StoreWriter.open(tmp_path / "store", make_manifest())
        assert len(Store(tmp_path / "store")) == 0  # readers do not mind
    fill(tmp_path / "store", range(1))


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from hsdump.store import StoreWriter\n"
        "from tests.store.making import make_manifest\n"
        "StoreWriter.open(Path(sys.argv[1]), make_manifest()); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "store"], check=False)
    assert done.returncode == -9
    assert_holds(tmp_path / "store", fill(tmp_path / "store", range(2)))


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match=r"is no store and not empty: it holds thesis\.tex"):
        StoreWriter.open(tmp_path, make_manifest())
    with pytest.raises(StoreError, match="is a file"):
        StoreWriter.open(tmp_path / "thesis.tex", make_manifest())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_that_cannot_be_written_is_refused_with_the_remedy() -> None:
    with pytest.raises(StoreError, match=r"cannot be written: .*\n  fix: name a writable folder"):
        StoreWriter.open(Path("/proc/hsdump-store"), make_manifest())


def test_no_store_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no .*/nowhere"):
        Store(tmp_path / "nowhere")
    with pytest.raises(StoreError, match=r"is not a store: it has no manifest\.json"):
        Store(tmp_path)


def test_an_unknown_codec_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="codec 'zip' is not known"):
        StoreWriter.open(tmp_path / "store", make_manifest(codec="zip"))


def test_samples_that_do_not_fit_are_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    one = make_sample(1, num_tokens=4)
    empty = TokenSample.make("empty", np.zeros(0, np.int64), np.zeros(0, np.uint8))
    with StoreWriter.open(tmp_path / "store", make_manifest()) as writer:
        with pytest.raises(StoreError, match="there are 2 states instead of 3"):
            writer.add(one.sample, one.states[:2])
        with pytest.raises(StoreError, match=r"layer4 is uint16 \[3, 8\]"):
            writer.add(one.sample, (one.states[0], one.states[1][:3], one.states[2]))
        with pytest.raises(StoreError, match="final is float32"):
            writer.add(one.sample, (*one.states[:2], one.states[2].astype(np.float32)))
        with pytest.raises(StoreError, match="0 tokens"):
            writer.add(empty, [np.zeros((0, 8), np.uint16)] * 3)
        writer.add(one.sample, one.states)
        writer.commit()
    with pytest.raises(StoreError, match="cannot be written any more: it was closed"):
        writer.commit()
    assert_holds(tmp_path / "store", [one])


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "store", range(1))
    manifest = tmp_path / "store" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 2'))
    for opening in (Store, lambda path: StoreWriter.open(path, make_manifest())):
        with pytest.raises(StoreError, match="has format version 2, this hsdump reads up to 1"):
            opening(tmp_path / "store")


def test_a_checking_reader_names_sample_and_tensor(tmp_path: Path) -> None:
    made = fill(tmp_path / "store", range(2))
    key = made[0].sample.key
    with Store(tmp_path / "store") as store:
        place = next(entry for entry in store.row(key).record.tensors if entry.name == "layer4")
    with shard_path(tmp_path / "store", 0).open("r+b") as file:
        file.seek(place.offset)
        byte = file.read(1)[0]
        file.seek(place.offset)
        file.write(bytes([byte ^ 1]))
    with Store(tmp_path / "store", check=True) as store:
        assert_equal(store, made[1])
        with pytest.raises(
            StoreCorrupt, match=rf"sample {key} \(row-0\) in 000000.safetensors has wrong bytes in layer4"
        ):
            store[key]


def test_a_truncated_shard_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    made = fill(tmp_path / "store", range(2))
    path = shard_path(tmp_path / "store", 0)
    os.truncate(path, path.stat().st_size // 2)
    with Store(tmp_path / "store") as store, pytest.raises(StoreCorrupt, match=r"cannot be read: 000000.*instead of"):
        store[made[0].sample.key]


def test_a_store_on_a_read_only_medium_is_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions do not stop root, so the failing open is made by hand."""
    made = fill(tmp_path / "store", range(2))
    real = Index.__init__.__globals__["_connect_read_only"]

    def refuse(path: Path, options: str) -> object:
        if "immutable" not in options:
            import sqlite3

            raise sqlite3.OperationalError("unable to open database file")
        return real(path, options)

    monkeypatch.setattr("hsdump.store.index._connect_read_only", refuse)
    assert_holds(tmp_path / "store", made)
