"""`hsdump train --backend speculators`: what lies ready is what that library's trainer reads."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
import torch

from hsdump.draft import attention
from hsdump.draft.attention import ByDocument, Flex
from hsdump.draft.backend import prepare_speculators
from hsdump.errors import UsageError
from hsdump.store import Store
from tests.draft.making import LAYERS, SMALL, sources_in


def test_the_rows_beside_the_states_have_what_the_loader_packs_by(tmp_path: Path) -> None:
    """speculators 0.9's `ArrowDataset` reads `seq_len` before anything else."""
    sources = sources_in(tmp_path)
    prepared = prepare_speculators(sources, SMALL)
    with pa.memory_map(str(Path(prepared.data) / "data-00000-of-00001.arrow")) as file:
        rows = pa.ipc.open_stream(file).read_all()
    with Store(sources.store) as store:
        assert rows["seq_len"].to_pylist() == list(store.lengths())
        assert rows["input_ids"][3].as_py() == store[3].input_ids.tolist()
    state = json.loads((Path(prepared.data) / "state.json").read_text())
    assert state["_data_files"] == [{"filename": "data-00000-of-00001.arrow"}]
    assert prepared.samples == len(rows)


def test_the_settings_are_those_of_our_drafter(tmp_path: Path) -> None:
    prepared = prepare_speculators(sources_in(tmp_path), SMALL)
    config = json.loads(Path(prepared.config).read_text())
    assert config["draft"]["target_layer_ids"] == LAYERS
    assert config["draft"]["full_attention_indices"] == [0]  # not its window of 2,048 tokens
    assert config["data"]["train_data_ratio"] == pytest.approx(1 - SMALL.held_out)


def test_its_loader_needs_samples_to_validate_on(tmp_path: Path) -> None:
    options = msgspec.structs.replace(SMALL, held_out=0.0)
    with pytest.raises(UsageError, match="--held-out 0 leaves nothing to validate on"):
        prepare_speculators(sources_in(tmp_path), options)


def test_flex_attention_that_was_refused_is_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_REFUSED", [])
    attention.refuse("no such instruction")
    torch.manual_seed(0)
    q, k, v = (torch.randn(heads, 9, 16, requires_grad=True) for heads in (4, 2, 2))
    documents = torch.repeat_interleave(torch.arange(2), torch.tensor([5, 4]))
    found, expected = Flex(documents)(q, k, v), ByDocument([5, 4])(q, k, v)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    found[0].sum().backward()  # flex attention without compilation has no backward
