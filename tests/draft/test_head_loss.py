"""The loss through the head in pieces: the same loss and gradients as autograd's own."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hsdump.draft import head_loss as made
from hsdump.draft.head_loss import Asked, head_loss, rows_of_steps
from hsdump.draft.loss import LOSSES, Loss, shift, step_mask

T, H, K, STEPS = 23, 8, 12, 4


class Case:
    """Random states of three documents, some of whose rows are learned from."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.documents = torch.repeat_interleave(torch.arange(3), torch.tensor([9, 3, 11]))
        self.mask = torch.rand(T) < 0.7
        self.head = torch.randn(K, H, requires_grad=True)
        self.normed = [torch.randn(T, H).to(dtype).requires_grad_() for _ in range(STEPS)]
        self.target = torch.randn(T, K).to(dtype)
        self.scales = torch.tensor([0.8**step / 7 for step in range(STEPS)])

    def in_pieces(self, loss: Loss) -> tuple[Tensor, Tensor]:
        rows_M, rows = rows_of_steps(self.mask, self.documents, STEPS)
        asked = Asked(loss=loss, rows=rows, scales=self.scales, target=self.target[rows_M])
        return head_loss(asked, self.head, self.normed)

    def by_autograd(self, loss: Loss) -> tuple[Tensor, Tensor]:
        """Give the same by the masks that counts are made with: every row computed, some of them summed."""
        total, sums = torch.zeros(()), []
        for step, normed in enumerate(self.normed):
            inside = step_mask(self.mask, self.documents, step)
            logits, target = normed @ self.head.to(normed.dtype).T, shift(self.target, step)
            lost = loss(logits, target)[inside].sum()
            right = (logits.argmax(-1) == target.argmax(-1))[inside].sum()
            total = total + self.scales[step] * lost
            sums.append(torch.stack([lost.detach(), right.float()]))
        return total, torch.stack(sums)

    def gradients(self) -> list[Tensor]:
        found: list[Tensor] = []
        for weight in (self.head, *self.normed):
            assert weight.grad is not None
            found.append(weight.grad)
        return found


def differentiate(loss: Loss, *, pieces: bool, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Give total, sums and gradients of a third of the total, a factor that bfloat16 does not hold."""
    case = Case(dtype)
    total, sums = case.in_pieces(loss) if pieces else case.by_autograd(loss)
    (total / 3).backward()
    return [total.detach(), sums, *case.gradients()]


def assert_same(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b)  # float32 in another order: torch's own tolerance


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("rows_a_piece", [5, 10_000])
def test_losses_and_gradients_are_autograds(monkeypatch: pytest.MonkeyPatch, name: str, rows_a_piece: int) -> None:
    monkeypatch.setattr(made, "PIECE_BYTES", rows_a_piece * 4 * K)
    assert_same(differentiate(LOSSES[name], pieces=True), differentiate(LOSSES[name], pieces=False))


def test_a_head_in_float32_gets_its_gradient_in_float32_from_states_in_bfloat16() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = differentiate(LOSSES["kl"], pieces=True, dtype=torch.bfloat16)
        expected = differentiate(LOSSES["kl"], pieces=False, dtype=torch.bfloat16)
    assert [one.dtype for one in found[2:]] == [torch.float32] + [torch.bfloat16] * STEPS
    for a, b in zip(found[2:], expected[2:], strict=True):
        # Autograd rounds the head's gradient to bfloat16 after every step, and this only once before they are summed.
        torch.testing.assert_close(a.float(), b.float(), rtol=2**-6, atol=2**-8 * float(b.float().abs().max()))


def test_a_step_without_rows_costs_nothing_and_breaks_nothing() -> None:
    mask, documents = torch.tensor([True, False, True]), torch.tensor([0, 1, 1])
    rows_M, rows = rows_of_steps(mask, documents, 3)
    assert rows_M.tolist() == [0, 2]
    assert [one.begins.tolist() for one in rows] == [[0, 2], [1], []]
    assert [one.about.tolist() for one in rows] == [[0, 1], [1], []]
    head, normed = torch.randn(K, H, requires_grad=True), [torch.randn(3, H) for _ in range(3)]
    asked = Asked(loss=LOSSES["kl"], rows=rows, scales=torch.ones(3), target=torch.randn(2, K))
    total, sums = head_loss(asked, head, normed)
    total.backward()
    assert sums[2].tolist() == [0, 0]
    assert torch.isfinite(head.grad).all()


class OnGpu:
    """Stands for a GPU, where losses are compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: object) -> None:
        monkeypatch.setattr(made, "_COMPILED", {})
        monkeypatch.setattr(made, "_REFUSED", set())
        monkeypatch.setattr(made, "_compiles", lambda _logits: True)
        compiler = torch.compile
        monkeypatch.setattr(torch, "compile", lambda loss, dynamic: compiler(loss, dynamic=dynamic, backend=backend))


def test_a_compiled_loss_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = differentiate(LOSSES["lk"], pieces=False)
    OnGpu(monkeypatch, "aot_eager")
    assert_same(differentiate(LOSSES["lk"], pieces=True), expected)
    assert not made._REFUSED


def test_where_the_compiler_fails_the_loss_is_computed_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_args: object) -> object:
        raise NotImplementedError("no such instruction")

    expected = differentiate(LOSSES["kl"], pieces=False)
    OnGpu(monkeypatch, broken)
    with caplog.at_level(logging.WARNING):
        assert_same(differentiate(LOSSES["kl"], pieces=True), expected)
    assert [record.levelname for record in caplog.records if record.name == made.__name__] == ["WARNING"]
    assert "does not compile" in caplog.text
