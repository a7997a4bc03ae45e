"""Switching auxiliary capture on in models whose setters disagree, and finding the hooks of a release."""

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hsdump.sglang import facts, taps, targets
from hsdump.sglang.facts import RunnerFacts, conflict, decode_obstacle
from hsdump.sglang.hooks import ServerCapture
from hsdump.sglang.switch import AuxSwitch, CannotSwitch
from hsdump.spool import ring
from hsdump.spool.names import SpoolPaths

NUM_LAYERS = 8
ROWS = torch.zeros(3, 4)
NOT_CAPTURED = (ROWS.shape, None)


class Inner(torch.nn.Module):
    """SGLang's forward loop: a bare tensor when it captured nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers_to_capture: list[int] = []
        self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(NUM_LAYERS))

    def wants(self, index: int) -> bool:
        return index in self.layers_to_capture

    def forward(self, hidden: torch.Tensor) -> Any:
        aux = [layer(hidden) for index, layer in enumerate(self.layers) if self.wants(index)]
        return (hidden, aux) if aux else hidden


class Llama(torch.nn.Module):
    """The setter most of SGLang's models have: always id + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()
        self.capture_aux_hidden_states = False

    def forward(self, hidden: torch.Tensor) -> Any:
        hidden, aux = self.model(hidden) if self.capture_aux_hidden_states else (self.model(hidden), None)
        return hidden.shape, aux and len(aux)

    def set_eagle3_layers_to_capture(self, ids: Sequence[int]) -> None:
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = [layer + 1 for layer in ids]


class Packed(Inner):
    """0.5.23 packs the states of deepseek_v2, and ends the pass when one is missing."""

    def forward(self, hidden: torch.Tensor) -> Any:
        found = super().forward(hidden)
        assert not isinstance(found, tuple) or len(found[1]) == len(self.layers_to_capture)
        return found


class DeepSeek(Llama):
    """deepseek_v2's: id + 1 only when the first id is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Packed()

    def set_eagle3_layers_to_capture(self, ids: Sequence[int]) -> None:
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = [layer + 1 for layer in ids] if ids[0] == 1 else list(ids)


class Kimi(torch.nn.Module):
    """A wrapper that delegates, as kimi_k25 does."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = DeepSeek()

    def set_eagle3_layers_to_capture(self, ids: Sequence[int]) -> None:
        self.language_model.set_eagle3_layers_to_capture(ids)


class Marked(Inner):
    def wants(self, index: int) -> bool:
        return getattr(self.layers[index], "_is_layer_to_capture", False)


class QwenMoe(Llama):
    """A mixture-of-experts model of the Qwen family: its setter marks the layers, and its loop sees the marks only."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Marked()

    def set_eagle3_layers_to_capture(self, ids: Sequence[int]) -> None:
        super().set_eagle3_layers_to_capture(ids)
        for layer in self.model.layers_to_capture:
            self.model.layers[layer]._is_layer_to_capture = True

    def marked(self) -> list[int]:
        return [k for k, layer in enumerate(self.model.layers) if getattr(layer, "_is_layer_to_capture", False)]


def test_marks_on_layers_go_on_and_off_with_the_rest() -> None:
    model = QwenMoe()
    switch = AuxSwitch(model, (2, 4, 5))
    assert model.marked() == [2, 4, 5]
    switch.off()
    assert model.marked() == []
    assert not model.capture_aux_hidden_states
    switch.on()
    assert model.marked() == [2, 4, 5]


def test_marks_in_another_place_than_asked_are_refused_and_taken_back() -> None:
    class Shifted(QwenMoe):
        def set_eagle3_layers_to_capture(self, ids: Sequence[int]) -> None:
            super().set_eagle3_layers_to_capture([layer - 2 for layer in ids])

    model = Shifted()
    with pytest.raises(CannotSwitch, match=r"asked for layers \[2, 4, 5\], the model's own setter marked \[0, 2, 3\]"):
        AuxSwitch(model, (2, 4, 5))
    assert model.marked() == []
    assert model(ROWS) == NOT_CAPTURED


def runner(model: torch.nn.Module) -> SimpleNamespace:
    return SimpleNamespace(model=model, server_args=SimpleNamespace(host="h", port=30000))


def says_of_itself(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Stand for a loaded ModelRunner, most of whose facts no test here looks at."""
    found = RunnerFacts(
        model_path="/m",
        model_class="M",
        num_layers=NUM_LAYERS,
        hidden_size=4,
        vocab_size=9,
        context_length=99,
        dtype="bfloat16",
        device="cpu",
        tp_rank=0,
        tp_size=1,
        dp_size=1,
        host="h",
        port=30000,
        rows_per_pass=16,
    )
    monkeypatch.setattr(facts, "read_facts", lambda _: replace(found, **changes))


def announced(root: Path) -> Any:
    return json.loads(SpoolPaths(root).server_file(os.getpid()).read_text())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        (Llama, "native:7"),
        (Llama, "native:3,7"),
        (DeepSeek, "native:3,8"),
        (QwenMoe, "native:3,7"),
        (QwenMoe, "native:1,2,20"),
        (Llama, "native:4,2"),
    ],
)
def test_a_set_up_that_fails_leaves_the_model_as_it_was(
    kind: type[Llama], ids: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the server ends in its first pass: a bare tensor is taken apart as if it were two."""
    monkeypatch.setenv("HSDUMP_LAYERS", ids)
    says_of_itself(monkeypatch, device=device)
    model = kind()
    capture = ServerCapture(tmp_path)
    assert capture.after_load_model("result", runner(model)) == "result"
    assert model(ROWS) == NOT_CAPTURED
    assert announced(tmp_path)["declined"]
    assert capture.around_forward(lambda _, batch: batch, None, "batch") == "batch"


@pytest.mark.parametrize(("ranks", "outcome"), [(1, NOT_CAPTURED), (2, (ROWS.shape, 1))])
def test_a_rank_whose_ring_does_not_fit_stays_in_step_with_the_others(
    ranks: int, outcome: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang gathers auxiliary states over the ranks where rows are scattered: all of them must, or none."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ring.os, "posix_fallocate", fail)
    monkeypatch.setenv("HSDUMP_LAYERS", "3")
    says_of_itself(monkeypatch, device="cuda", tp_size=ranks)
    model, capture = Llama(), ServerCapture(tmp_path)
    capture.after_load_model(None, runner(model))
    assert "No space left" in announced(tmp_path)["declined"]
    assert model(ROWS) == outcome
    if ranks > 1:
        assert capture.around_logits(lambda *args: args[-1], None, None, None, None, None, "aux") is None


def test_a_tap_that_cannot_be_made_leaves_no_ring_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory that nobody writes to would be missing until the server ends."""

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("out of the device's memory")

    monkeypatch.setattr(taps, "RingTap", fail)
    monkeypatch.setenv("HSDUMP_LAYERS", "3")
    monkeypatch.setenv("HSDUMP_SPOOL_BYTES", str(1 << 20))
    says_of_itself(monkeypatch, device="cuda")
    ServerCapture(tmp_path).after_load_model(None, runner(Llama()))
    assert "out of the device's memory" in announced(tmp_path)["declined"]
    assert list(tmp_path.glob("ring-*")) == []


def test_a_runner_without_its_settings_is_announced_all_the_same(tmp_path: Path) -> None:
    assert ServerCapture(tmp_path).after_load_model("result", SimpleNamespace()) == "result"
    assert "AttributeError" in announced(tmp_path)["declined"]


@pytest.mark.parametrize("model_class", [Llama, DeepSeek, Kimi])
@pytest.mark.parametrize("layers", [(1, 3, 5), (2, 3, 4), (3,)])
def test_the_layers_that_were_asked_for_arrive_whatever_the_setter_does(
    model_class: type[torch.nn.Module], layers: tuple[int, ...]
) -> None:
    model = model_class()
    switch = AuxSwitch(model, layers)
    core = model.language_model if isinstance(model, Kimi) else model
    assert core.model.layers_to_capture == list(layers)
    assert core.capture_aux_hidden_states
    switch.off()
    assert core.model.layers_to_capture == []
    assert not core.capture_aux_hidden_states
    switch.on()
    assert core.model.layers_to_capture == list(layers)


@pytest.mark.parametrize(
    ("kind", "native", "layers"),
    [
        (Llama, (2, 4, 5), (3, 5, 6)),
        (DeepSeek, (2, 3, 4), (2, 3, 4)),
        (DeepSeek, (1, 3, 4), (2, 4, 5)),
        (QwenMoe, (2, 4, 5), (3, 5, 6)),
    ],
)
def test_ids_of_the_models_own_go_to_its_setter_unchanged(
    kind: type[Llama], native: tuple[int, ...], layers: tuple[int, ...]
) -> None:
    switch = AuxSwitch(kind(), (), native)
    assert (switch.layers, switch.engine_layers) == (layers, native)


def test_the_models_own_ids_for_our_layers_are_announced() -> None:
    assert AuxSwitch(Llama(), (3, 5, 6)).engine_layers == (2, 4, 5)
    assert AuxSwitch(DeepSeek(), (2, 3, 4)).engine_layers == (2, 3, 4)
    assert AuxSwitch(DeepSeek(), (1, 3, 4)).engine_layers == (), "its setter has no way to say that"
    with pytest.raises(CannotSwitch, match=r"the model's own ids \[4, 2\] come to layers \[5, 3\]"):
        AuxSwitch(Llama(), (), (4, 2))


@pytest.mark.parametrize(
    ("args", "device", "hidden"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"disable_cuda_graph": True}, "cuda", False),
        ({"cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(backend="disabled"))}, "cuda", False),
    ],
)
def test_decode_steps_that_a_graph_hides_name_the_flag(args: dict[str, object], device: str, hidden: bool) -> None:
    assert ("--disable-cuda-graph" in decode_obstacle(SimpleNamespace(**args), device)) == hidden


def test_a_model_whose_capture_is_in_use_is_left_alone() -> None:
    model = Llama()
    model.set_eagle3_layers_to_capture([1, 2, 3])
    with pytest.raises(CannotSwitch, match="already in use"):
        AuxSwitch(model, (2, 3, 4))
    assert model.model.layers_to_capture == [2, 3, 4]


def test_a_model_without_or_with_two_capture_points_is_refused() -> None:
    with pytest.raises(CannotSwitch, match="has 0 modules with layers_to_capture"):
        AuxSwitch(torch.nn.Linear(1, 1), (2,))
    both = torch.nn.ModuleList([Llama(), Llama()])
    with pytest.raises(CannotSwitch, match="has 2 modules with layers_to_capture"):
        AuxSwitch(both, (2,))


@pytest.mark.parametrize("version", ["0.5.11", "0.5.12.post1", "0.5.17", "0.5.23", "0.5.20+cu129"])
def test_releases_of_the_table_need_no_note(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_check_features", lambda _: None)
    assert targets.targets_for(version) == (targets.Targets(), ())


@pytest.mark.parametrize("version", ["0.5.24", "0.6.0", "0.5.10", "0.5.23.dev17+gabcdef", "our-fork"])
def test_an_unknown_release_is_tried_by_feature_and_says_so(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_check_features", lambda _: None)
    _, notes = targets.targets_for(version)
    assert notes
    assert f"SGLang {version} is outside 0.5.11..0.5.23" in notes[0]


def test_a_release_without_the_functions_to_hook_is_unsupported() -> None:
    with pytest.raises(targets.Unsupported, match="does not exist"):
        targets.targets_for("0.5.23")  # sglang is not installed in this environment


@pytest.mark.parametrize(
    ("setting", "value", "word"),
    [
        ("speculative_algorithm", "EAGLE3", "--speculative-algorithm EAGLE3"),
        ("enable_return_aux_hidden_states", True, "--enable-return-aux-hidden-states"),
        ("pp_size", 2, "--pp-size 2"),
        ("enable_dp_attention", True, "--enable-dp-attention"),
        ("enable_layernorm_sp", True, "--enable-layernorm-sp"),
        ("attn_cp_size", 2, "--attn-cp-size 2"),
        ("disaggregation_mode", "prefill", "--disaggregation-mode prefill"),
    ],
)
def test_settings_under_which_rows_would_be_wrong_are_named(setting: str, value: object, word: str) -> None:
    assert conflict(SimpleNamespace(server_args=SimpleNamespace())) is None
    found = conflict(SimpleNamespace(server_args=SimpleNamespace(**{setting: value})))
    assert found is not None
    assert word in found
