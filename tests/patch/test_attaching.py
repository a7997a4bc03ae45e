"""What the blocks call, in this process: wrapped classes of SGLang's shape, and the tap in a forward loop."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hsdump.capture.batch import BatchStates, Segment
from hsdump.patch.blocks import insert
from hsdump.patch.site import find_site
from hsdump.patch.transaction import make_plan
from hsdump.sglang import hooks, loop, patched
from tests.patch.making import BATCH, LOGITS, RUNNER, make_site

OURS = "hsdump-0123abcd-" + "a" * 32 + "-0-3"


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make this process look like one in which nothing was attached, with the switch on."""
    monkeypatch.setattr(patched, "_state", patched._Attached())
    monkeypatch.setattr(hooks, "_attached", [])
    monkeypatch.setattr(patched, "_version", lambda: ("0.5.9", ()))
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", str(tmp_path / "spool"))


def made(text: str | bytes, name: str) -> Any:
    """Run a module's text, and give one of its classes."""
    space: dict[str, Any] = {"__name__": "builtins"}
    exec(compile(text, name, "exec"), space)  # noqa: S102 - our own text
    return space[name]


def test_the_methods_of_three_classes_are_wrapped() -> None:
    logits, runner = made(LOGITS, "LogitsProcessor"), made(RUNNER, "ModelRunner")
    patched.attach_logits(logits)
    patched.attach_runner(runner)
    batch = made(BATCH, "ForwardBatch")
    patched.attach_batch(batch)
    assert patched.attached() == ["LogitsProcessor", "ModelRunner", "ForwardBatch"]
    prefill = batch.init_new(SimpleNamespace(reqs=[SimpleNamespace(rid="a"), SimpleNamespace(rid="b")]), None)
    assert prefill.rids == ["a", "b"]
    assert batch.init_new(SimpleNamespace(reqs=None), None).rids is None
    # Nothing is captured yet, so auxiliary states go their way as before.
    assert logits().forward(1, 2, 3, logits_metadata=4, aux_hidden_states="aux") == "aux"
    assert runner().forward("batch", skip=True) == "batch"


def test_half_a_patch_captures_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(hooks.ServerCapture, "give_up", lambda _self, reason, **_: told.append(reason))
    runner = made(RUNNER, "ModelRunner")
    patched.attach_runner(runner)
    runner().load_model()
    assert told == ["only a part of the patch is in place; see `hsdump patch status`"]


def test_where_the_plugin_has_attached_the_patch_stays_out() -> None:
    assert hooks.claim("plugin")
    logits = made(LOGITS, "LogitsProcessor")
    before = logits.forward
    patched.attach_logits(logits)
    assert logits.forward is before
    assert patched.attached() == []


class Layer(torch.nn.Module):
    """Writes into both of its arguments, as SGLang's fused kernels do."""

    def forward(self, _positions: Any, hidden: torch.Tensor, _batch: Any, residual: torch.Tensor | None) -> Any:
        residual = hidden.clone() if residual is None else residual.add_(hidden)
        return hidden.mul_(0.5).add_(1.0), residual


class Recorder:
    def __init__(self) -> None:
        self.taken: list[tuple[list[Segment], BatchStates]] = []
        self.refused: list[tuple[str, str]] = []
        self.settled = 0

    def take(self, segments: list[Segment], states: BatchStates) -> None:
        self.taken.append((segments, states))

    def settle(self) -> None:
        self.settled = len(self.taken)

    def refuse(self, _segments: list[Segment], reason: str, detail: str) -> None:
        self.refused.append((reason, detail))


def test_the_tap_in_a_loop_takes_layers_and_final_state_of_prefill_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = find_site(folder=make_site(tmp_path / "site"))
    change = make_plan(site, "models/tiny.py").changes[0]
    kind = made(insert(change.edit.original, change.record.texts), "TinyModel")
    assert patched.attached() == ["TinyModel"]
    tap = Recorder()
    args = SimpleNamespace(host="h", port=1, device="cpu")
    monkeypatch.setattr(loop, "_server_args", lambda: args)
    monkeypatch.setattr(loop, "_facts", lambda *_: SimpleNamespace(num_layers=6))
    monkeypatch.setattr(hooks.ServerCapture, "_open", lambda self, *_: setattr(self, "_tap", tap))
    monkeypatch.setenv("HSDUMP_LAYERS", "1,2,4")
    model = kind()
    model.start_layer, model.end_layer, model.last = 0, 6, True
    model.layers = [Layer() for _ in range(6)]
    model.norm = lambda hidden, residual: (hidden + residual, None)

    def mode(extend: bool) -> Any:
        return SimpleNamespace(is_extend=lambda: extend)

    ids = torch.arange(5, dtype=torch.float32)[:, None].repeat(1, 2)
    batch = SimpleNamespace(
        forward_mode=mode(True), rids=["other", OURS], extend_prefix_lens_cpu=[0, 0], extend_seq_lens_cpu=[2, 3]
    )
    final = model.forward(ids.clone(), None, batch)
    ((segments, states),) = tap.taken
    assert [(part.first_row, part.num_rows) for part in segments] == [(2, 3)]
    hidden, residual, expected = ids.clone(), None, {}
    for index in range(6):
        expected[index] = hidden.clone() if residual is None else hidden + residual
        hidden, residual = Layer()(None, hidden, None, residual)
    for found, layer in zip(states.aux, (1, 2, 4), strict=True):
        assert torch.equal(found, expected[layer])
    assert torch.equal(states.final, final)
    assert tap.settled == 1
    assert tap.refused == []
    for decode in (SimpleNamespace(forward_mode=mode(False)), SimpleNamespace(forward_mode=mode(True), rids=["other"])):
        model.forward(ids.clone(), None, decode)
    assert len(tap.taken) == 1
    model.end_layer = 3  # two-batch overlap would run the rest elsewhere
    model.forward(ids.clone(), None, batch)
    assert tap.refused == [("capture-error", "ValueError: the loop did not pass layers [4]")]


@pytest.mark.parametrize(
    ("setting", "word"),
    [("enable_two_batch_overlap", "--enable-two-batch-overlap"), ("enable_torch_compile", "--enable-torch-compile")],
)
def test_settings_under_which_a_loop_does_not_see_every_row(setting: str, word: str) -> None:
    assert loop._loop_conflict(SimpleNamespace(device="cpu", disable_piecewise_cuda_graph=False)) is None
    assert loop._loop_conflict(SimpleNamespace(device="cpu", **{setting: True})) == word
    graphs = loop._loop_conflict(SimpleNamespace(device="cuda", disable_piecewise_cuda_graph=False))
    assert graphs is not None
    assert "--disable-piecewise-cuda-graph" in graphs
