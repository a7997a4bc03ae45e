"""Muon beside AdamW: which weights it changes, that a resume is exact, and where it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hsdump.draft.checkpoints import OPTIMIZER, WEIGHTS, load_tensors, pointed
from hsdump.draft.progress import Progress
from hsdump.draft.train import train
from hsdump.errors import UsageError
from tests.draft.making import SMALL, sources_in

MUON = msgspec.structs.replace(SMALL, optimizer="muon", max_steps=7)


def test_a_resume_with_muon_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    train(sources_in(tmp_path, "whole"), MUON, quiet=True)
    row = Progress.row

    def stop_at_five(self: Progress, values: dict[str, Any]) -> None:
        if values["step"] == 5:
            raise KeyboardInterrupt
        row(self, values)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "row", stop_at_five)
        with pytest.raises(KeyboardInterrupt):
            train(sources_in(tmp_path, "cut"), MUON, quiet=True)
    assert train(sources_in(tmp_path, "cut"), MUON, quiet=True).steps == 7
    for file in (WEIGHTS, OPTIMIZER):
        one, other = (load_tensors(pointed(tmp_path / name, "last") / file) for name in ("whole", "cut"))  # type: ignore[operator]  # both have one
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), file


def test_muon_has_the_matrices_inside(tmp_path: Path) -> None:
    train(sources_in(tmp_path), msgspec.structs.replace(MUON, max_steps=1), quiet=True)
    moments = load_tensors(pointed(tmp_path / "drafter", "last") / OPTIMIZER)  # type: ignore[operator]  # it has one
    muon = {name.removesuffix(".momentum_buffer") for name in moments if name.endswith(".momentum_buffer")}
    assert {"fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.down_proj.weight"} <= muon
    assert not muon & {"lm_head.weight", "norm.weight", "layers.0.hidden_norm.weight"}
    assert "lm_head.weight.exp_avg_sq" in moments


def test_muon_needs_whole_matrices(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--optimizer muon needs whole matrices"):
        train(sources_in(tmp_path), msgspec.structs.replace(MUON, fsdp=True), quiet=True)
