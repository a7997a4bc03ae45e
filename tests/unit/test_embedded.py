"""The embedded engine against a direct forward of the same tiny model."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hsdump.arrays import NUMPY_DTYPES, StateArray, to_float32
from hsdump.cli.main import main
from hsdump.engines.base import CapturedSample, CaptureFailed, CaptureRequest
from hsdump.engines.embedded import EmbeddedEngine, _decoder_parts, cpu_has_bfloat16
from hsdump.errors import InputError, ServerError, UsageError

VOCAB = 128
CONTEXT = 64
LAYERS = 6
HIDDEN = 32


def save_llama(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 2.0)  # a norm of ones would hide one that is applied twice
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


def run(engine: EmbeddedEngine, *rows: list[int]) -> list[CapturedSample | BaseException]:
    async def all_at_once() -> list[CapturedSample | BaseException]:
        requests = [
            CaptureRequest(key=f"{index:032x}", input_ids=np.array(row, dtype=np.int64), attempt=0)
            for index, row in enumerate(rows)
        ]
        return await asyncio.gather(*map(engine.capture, requests), return_exceptions=True)

    return asyncio.run(all_at_once())


def capture(engine: EmbeddedEngine, row: list[int]) -> CapturedSample:
    (result,) = run(engine, row)
    assert isinstance(result, CapturedSample), result
    return result


def bits(tensor: torch.Tensor) -> StateArray:
    tensor = tensor.detach()
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_are_those_of_a_direct_forward(tmp_path: Path, dtype: str) -> None:
    path = save_llama(tmp_path, getattr(torch, dtype))
    engine = EmbeddedEngine(str(path), layers=None)
    info = engine.handshake()
    assert (info.engine, info.attach, info.engine_version) == ("transformers", "embedded", transformers.__version__)
    assert (info.num_layers, info.vocab_size, info.context_length) == (LAYERS, VOCAB, CONTEXT)
    assert (info.model_class, info.device, info.spool_dir) == ("LlamaForCausalLM", "cpu", None)
    assert info.shape.layers == (2, 3, 4)
    assert (info.shape.dtype, info.shape.hidden_size, info.shape.final_state) == (dtype, HIDDEN, "post_norm")

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, VOCAB, size).tolist() for size in (1, 7, CONTEXT)]
    for row, found in zip(rows, run(engine, *rows), strict=True):
        assert isinstance(found, CapturedSample)
        with torch.no_grad():
            expected = model(torch.tensor([row]), output_hidden_states=True)
        np.testing.assert_array_equal(found.token_ids, row)
        assert len(found.states) == len(info.shape.names)
        for index, state in zip((*info.shape.layers, -1), found.states, strict=True):
            assert state.dtype == NUMPY_DTYPES[dtype]
            assert state.flags.c_contiguous
            # The same kernels on the same shapes in one process: the bits are the same.
            np.testing.assert_array_equal(state, bits(expected.hidden_states[index][0]))
        logits = to_float32(found.states[-1], dtype) @ model.lm_head.weight.detach().float().numpy().T
        # bfloat16 rounds each logit to 8 bits of mantissa; float32 differs by the order of 32 additions.
        np.testing.assert_allclose(
            logits, expected.logits[0].float().numpy(), atol=1e-2 if dtype == "bfloat16" else 1e-4, rtol=1e-2
        )
    asyncio.run(engine.close())


def test_both_final_states(llama: Path) -> None:
    """What stands before the norm becomes what stands behind it by the model's own norm, bit for bit."""
    both = EmbeddedEngine(str(llama), layers=None, final_state="both")
    assert both.handshake().shape.names[-2:] == ("final", "final_pre_norm")
    *_, post, pre = capture(both, [3, 1, 4, 1, 5]).states
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        normed = model.model.norm(torch.from_numpy(pre)[None])[0].numpy()
    np.testing.assert_array_equal(normed, post)
    alone = EmbeddedEngine(str(llama), layers=None, final_state="pre_norm")
    assert alone.handshake().shape.names[-1] == "final"
    np.testing.assert_array_equal(capture(alone, [3, 1, 4, 1, 5]).states[-1], pre)


def test_a_dtype_of_the_users_choice(llama: Path) -> None:
    info = EmbeddedEngine(str(llama), layers=(1,), dtype="float16").handshake()
    assert (info.shape.dtype, info.shape.layers) == ("float16", (1,))
    with pytest.raises(UsageError, match="dtype int8 cannot be captured"):
        EmbeddedEngine(str(llama), layers=None, dtype="int8")


def test_states_computed_in_float32_are_the_models_rounded_once(tmp_path: Path) -> None:
    path = save_llama(tmp_path, torch.bfloat16)
    engine = EmbeddedEngine(str(path), layers=(2,), compute="float32")
    info = engine.handshake()
    assert info.shape.dtype == "bfloat16"
    assert info.engine_version == f"{transformers.__version__}+float32"
    assert info.notes == ("computed in float32, the states rounded to bfloat16",)
    row = list(range(40))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        hidden = model(torch.tensor([row]), output_hidden_states=True).hidden_states
    for found, index in zip(capture(engine, row).states, (2, -1), strict=True):
        np.testing.assert_array_equal(found, bits(hidden[index][0].to(torch.bfloat16)))
    asyncio.run(engine.close())


def test_a_float32_model_is_computed_as_it_is(tmp_path: Path) -> None:
    path = save_llama(tmp_path, torch.float32)
    info = EmbeddedEngine(str(path), layers=(2,), compute="float32").handshake()
    assert (info.shape.dtype, info.engine_version, info.notes) == ("float32", transformers.__version__, ())


def test_asked_layers_come_in_ascending_order(llama: Path) -> None:
    engine = EmbeddedEngine(str(llama), layers=(5, 1))
    assert engine.handshake().shape.layers == (1, 5)
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        expected = model(torch.tensor([[3, 1, 4]]), output_hidden_states=True).hidden_states
    first, second, _final = capture(engine, [3, 1, 4]).states
    np.testing.assert_array_equal(first, expected[1][0].numpy())
    np.testing.assert_array_equal(second, expected[5][0].numpy())


def test_layers_outside_the_model(llama: Path) -> None:
    with pytest.raises(UsageError, match=r"layers \[6\] are outside this model of 6 layers"):
        EmbeddedEngine(str(llama), layers=(2, 6)).handshake()


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ([1, VOCAB, 2], "token-outside-vocabulary", "row 1 is token 128, the vocabulary has 128"),
        ([1, 2, -1], "token-outside-vocabulary", "row 2 is token -1"),
        ([1] * (CONTEXT + 1), "longer-than-context", "65 tokens, the model takes 64"),
        ([], "empty", "the sample has no tokens"),
    ],
)
def test_samples_that_the_model_cannot_take(llama: Path, row: list[int], reason: str, detail: str) -> None:
    engine = EmbeddedEngine(str(llama), layers=None)
    engine.handshake()
    good, failure = run(engine, [1, 2, 3], row)
    assert isinstance(good, CapturedSample)
    assert isinstance(failure, CaptureFailed)
    assert (failure.reason, failure.transient) == (reason, False)
    assert detail in failure.detail


def test_out_of_memory_is_one_failed_sample(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EmbeddedEngine(str(llama), layers=None)
    engine.handshake()

    def no_room(*_args: Any, **_options: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 8 GiB")

    monkeypatch.setattr(transformers.LlamaModel, "forward", no_room)
    (failure,) = run(engine, [1, 2])
    assert isinstance(failure, CaptureFailed)
    assert (failure.reason, failure.transient) == ("out-of-memory", False)


def break_model(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let `LlamaModel.forward` give hidden states as `change(model, hidden_states)` makes them."""
    forward = transformers.LlamaModel.forward

    def changed(self: Any, *args: Any, **options: Any) -> Any:
        output = forward(self, *args, **options)
        output.hidden_states = change(self, tuple(output.hidden_states))
        return output

    monkeypatch.setattr(transformers.LlamaModel, "forward", changed)


def test_a_last_state_before_the_norm_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw: list[torch.Tensor] = []
    layer = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    forward = layer.forward

    def remember(self: Any, *args: Any, **options: Any) -> Any:
        output = forward(self, *args, **options)
        raw.append(output[0] if isinstance(output, tuple) else output)
        return output

    monkeypatch.setattr(layer, "forward", remember)
    break_model(monkeypatch, lambda _model, hidden: (*hidden[:-1], raw[-1]))
    with pytest.raises(ServerError, match=r"not the final norm's .* the last layer's output before any norm"):
        EmbeddedEngine(str(llama), layers=None).handshake()


def test_a_norm_applied_twice_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_model(monkeypatch, lambda model, hidden: (*hidden[:-1], model.norm(hidden[-1])))
    with pytest.raises(ServerError, match=r"not the final norm's output .* but something else"):
        EmbeddedEngine(str(llama), layers=None).handshake()


def test_states_shifted_by_one_layer_are_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_model(monkeypatch, lambda _model, hidden: (hidden[0], *hidden[:-2], hidden[-1]))
    with pytest.raises(ServerError, match=r"hidden_states\[1\] is not the output of layer 0"):
        EmbeddedEngine(str(llama), layers=None).handshake()


def test_a_state_too_few_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_model(monkeypatch, lambda _model, hidden: hidden[1:])
    with pytest.raises(ServerError, match="6 hidden states and 6 outputs of 6 layers"):
        EmbeddedEngine(str(llama), layers=None).handshake()


def test_a_path_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be loaded as a model[\s\S]*fix: it needs config\.json"):
        EmbeddedEngine(str(tmp_path), layers=None).handshake()
    with pytest.raises(InputError, match="fix: name an existing model folder"):
        EmbeddedEngine(str(tmp_path / "nothing"), layers=None).handshake()


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    save_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="safetensors weights"):
        EmbeddedEngine(str(tmp_path), layers=None).handshake()


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    config = json.loads((save_llama(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS + 1}))
    with pytest.raises(InputError, match=r"lacks \d+ weights of LlamaForCausalLM, such as model\.layers\.6\."):
        EmbeddedEngine(str(tmp_path), layers=None).handshake()


def test_an_unknown_device(llama: Path) -> None:
    with pytest.raises(UsageError, match="the model cannot be put on 'warp:0'"):
        EmbeddedEngine(str(llama), layers=None, device="warp:0").handshake()


def test_without_torch(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match=r"needs torch[\s\S]*fix: install it"):
        EmbeddedEngine(str(llama), layers=None).handshake()


def test_a_dtype_that_no_store_holds(tmp_path: Path) -> None:
    save_llama(tmp_path, torch.float64)
    with pytest.raises(ServerError, match="computes in float64"):
        EmbeddedEngine(str(tmp_path), layers=None).handshake()


def test_a_model_without_a_list_of_layers(llama: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    with pytest.raises(ServerError, match="no list of 7 decoder layers was found"):
        _decoder_parts(model, LAYERS + 1)


def test_a_model_without_a_context_length_says_so(tmp_path: Path) -> None:
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=LAYERS, n_head=4)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    engine = EmbeddedEngine(str(tmp_path), layers=(1,))
    assert engine.handshake().notes == ("the model's config names no context length: none is checked",)
    assert len(capture(engine, [1] * (CONTEXT + 1)).token_ids) == CONTEXT + 1


@pytest.mark.parametrize(
    ("flags", "has"),
    [("flags : fpu avx2 avx512f", False), ("flags : amx_bf16 amx_tile", True), ("Features : asimd bf16", True)],
)
def test_a_cpu_without_bfloat16_is_known(tmp_path: Path, flags: str, has: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    assert cpu_has_bfloat16(tmp_path / "cpuinfo") is has
    assert cpu_has_bfloat16(tmp_path / "nothing"), "where nobody can say, nobody is told"


def test_a_quantized_model_is_not_widened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.LlamaForCausalLM, "is_quantized", True, raising=False)
    with pytest.raises(InputError, match="is quantized"):
        EmbeddedEngine(str(save_llama(tmp_path, torch.bfloat16)), layers=(2,), compute="float32").handshake()


@pytest.mark.parametrize("words", [["--server", "http://127.0.0.1:1"], ["--collector", "http://127.0.0.1:1"]])
def test_a_server_is_not_told_what_to_reckon_in(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = [] if "--collector" in words else ["--out", str(tmp_path / "store")]
    assert main(["extract", "rows.jsonl", *words, *out, "--compute", "float32"]) == UsageError.exit_code
    assert "--compute float32 is for --engine transformers" in capsys.readouterr().err
