"""Exports are loaded by the consumers' own readers (`make consumers` brings them; skipped where they are not there)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hsdump.store.export import FORMATS, ExportOptions, export_store
from tests.store.making import Made
from tests.store.test_export import WIDTH, as_torch, assert_same_behind_the_norm, make_model, make_store, norm

CONSUMERS = Path(__file__).parents[2] / ".cache" / "consumers"

pytestmark = pytest.mark.skipif(not (CONSUMERS / "built").exists(), reason="no readers here: make consumers")

POST_NORM = {"specforge": "hidden_state", "modelopt": "base_model_hidden_states"}
PRE_NORM = {"speculators": "verifier_last_hidden_states", "speculators-v1": "verifier_last_hidden_states"}
AUXILIARY = {
    "specforge": "aux_hidden_state",
    "modelopt": "aux_hidden_states",
    "speculators": "hidden_states",
    "speculators-v1": "hidden_states",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One store, and what each consumer read of its export."""

    made: list[Made]
    pre_norm: list[torch.Tensor]
    weight: torch.Tensor
    read: dict[str, list[dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """All exports of two stores, read in one process: what the readers import takes seconds."""
    folder = tmp_path_factory.mktemp("consumers")
    checkpoint = make_model(folder)
    weight = load_file(checkpoint / "model.safetensors")["model.norm.weight"]
    stores, jobs = {}, {}
    for final_state in ("post_norm", "both"):
        stores[final_state] = make_store(folder / final_state, checkpoint, final_state=final_state)
        for to in (*FORMATS, "specforge-gzip"):
            name = to.removesuffix("-gzip")
            out, result = folder / f"{final_state}-{to}", folder / f"{final_state}-{to}.pt"
            export_store(folder / final_state, ExportOptions(to=name, out=out, gzip=name != to))
            jobs[final_state, to] = (f"{name}:{out}:{result}", result)
    script = Path(__file__).parent / "consumers" / "read.py"
    command = [sys.executable, script, CONSUMERS, *(job for job, _ in jobs.values())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {
        final_state: Case(
            made=made,
            pre_norm=before,
            weight=weight,
            read={to: torch.load(jobs[final_state, to][1], weights_only=True) for to in (*FORMATS, "specforge-gzip")},
        )
        for final_state, (_, made, before) in stores.items()
    }


@pytest.mark.parametrize("final_state", ["post_norm", "both"])
@pytest.mark.parametrize("to", [*sorted(FORMATS), "specforge-gzip"])
def test_the_consumers_reader_gives_what_was_captured(cases: dict[str, Case], to: str, final_state: str) -> None:
    case, name = cases[final_state], to.removesuffix("-gzip")
    assert len(case.read[to]) == len(case.made)
    by_ids = {tuple(sample["input_ids"].flatten().tolist()): sample for sample in case.read[to]}
    for one, pre in zip(case.made, case.pre_norm, strict=True):
        sample = by_ids[tuple(one.sample.input_ids.tolist())]
        assert sample["loss_mask"].flatten().tolist() == one.sample.loss_mask.tolist()
        auxiliary = sample[AUXILIARY[name]].reshape(len(one.sample.input_ids), 2 * WIDTH)
        assert torch.equal(auxiliary, torch.cat([as_torch(state) for state in one.states[:2]], dim=-1))
        if name in POST_NORM:
            final = sample[POST_NORM[name]].reshape(-1, WIDTH)
            assert torch.equal(final, norm(pre, case.weight))
            assert not sample.get("base_hidden_prenorm", False)
        elif final_state == "both":
            assert torch.equal(sample[PRE_NORM[name]], pre)
        else:
            assert_same_behind_the_norm(sample[PRE_NORM[name]], pre, case.weight)
