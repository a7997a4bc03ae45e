"""Muon beside AdamW: which weights it changes, that a resume is exact, and where it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hsdump.draft.checkpoints import OPTIMIZER, WEIGHTS, load_tensors, pointed
from hsdump.draft.muon import Muon, orthogonal
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


def test_muon_takes_torchs_steps() -> None:
    """torch's reckons in bfloat16. Its steps differ from the exact ones by that rounding: 2**-9 in each of 3 products
    of 5 iterations, whose errors add up in the root mean square and are stretched by the iteration's gain of 3.4.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = ((24, 16), (16, 40), (16, 16))
    gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(3)]
    moved = []
    for make in (
        lambda weights: Muon(weights, lr=0.01, weight_decay=0.1),
        lambda weights: torch.optim.Muon(weights, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ):
        weights = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = make(weights)
        for step in gradients:
            for weight, gradient in zip(weights, step, strict=True):
                weight.grad = gradient.clone()
            optimizer.step()
        moved.append([weight.detach() - 1 for weight in weights])
    for ours, torchs in zip(*moved, strict=True):
        assert float((ours - torchs).norm() / torchs.norm()) <= 3.4 * 15**0.5 * 2**-9


@pytest.mark.parametrize("shape", [(8, 8), (8, 32), (32, 8)])
def test_a_step_is_as_long_in_every_direction(shape: tuple[int, int]) -> None:
    """The bounds are those that the iteration's coefficients lead to (Keller Jordan's page names 0.7 to 1.2)."""
    step = orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(1)), torch.float32)
    assert step.shape == shape
    lengths = torch.linalg.svdvals(step)
    assert float(lengths.min()) >= 0.65
    assert float(lengths.max()) <= 1.25
