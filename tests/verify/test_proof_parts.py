"""The parts of the proof, each against torch, transformers or data broken on purpose."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hsdump.arrays import to_float32
from hsdump.cli.main import main
from hsdump.draft.begin import check_store
from hsdump.errors import InputError, StoreError
from hsdump.samples import TokenSample
from hsdump.schema import EngineInfo, StateShape
from hsdump.store import Store, StoreWriter
from hsdump.store.fp8 import from_float32
from hsdump.verify.checkpoint import Checkpoint
from hsdump.verify.compare import compare_stores
from hsdump.verify.grid import GridEvidence
from hsdump.verify.head import Head, HeadSettings
from hsdump.verify.probe import Captured, Prober
from hsdump.verify.proof_file import proof_standing
from hsdump.verify.prove import ProofReport, ProveOptions, Prover, prove_store
from hsdump.verify.reference import StreamingReference
from hsdump.verify.rows import Move, find_moves, norm_apart
from hsdump.verify.texts import TextChecker
from hsdump.verify.witness import Answer, Witness
from tests.store.making import Made, make_manifest, make_sample

ANSWER = "Eight, as a rule; the bridge opens at seven, and a little patience depends on what you mean by dry. "
IDS = np.random.default_rng(5).integers(3, 2048, (2, 24))


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3", "dsv3"])
def oracle(request: pytest.FixtureRequest) -> tuple[Path, list[torch.Tensor], torch.Tensor]:
    """Give a model's folder, its hidden states [2, 24, 256] and logits, by transformers."""
    path: Path = request.getfixturevalue(f"tiny_{request.param}")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        result = model(torch.tensor(IDS), output_hidden_states=True, use_cache=False)
    return path, list(result.hidden_states), result.logits


def test_the_streaming_reference_is_transformers_bit_for_bit(
    oracle: tuple[Path, list[torch.Tensor], torch.Tensor],
) -> None:
    path, hidden, _ = oracle
    reference = StreamingReference(Checkpoint(path))
    embedded = reference.embed(IDS)
    assert torch.equal(embedded, hidden[0])
    found = reference.run(embedded, 0, reference.num_layers)
    assert all(torch.equal(found[index], hidden[index]) for index in range(1, len(hidden)))
    assert reference.seen_layers == list(range(reference.num_layers)), "each layer is read once"
    middle = reference.run(hidden[3], 3, 5)
    assert torch.equal(middle[5], hidden[5])
    assert all(value.device.type == "meta" for layer in reference._layers for value in layer.parameters())


def test_the_head_gives_torchs_log_probabilities(oracle: tuple[Path, list[torch.Tensor], torch.Tensor]) -> None:
    path, hidden, logits = oracle
    expected = torch.log_softmax(logits[0].float(), dim=-1).numpy()
    targets = np.append(IDS[0, 1:], 7)
    found = Head(Checkpoint(path), 2048).logprobs(bits(hidden[-1][0]), "bfloat16", targets, np.full(24, -1))
    # bfloat16 logits of order 1 have steps of 0.004; two matrix products may round to neighbours.
    np.testing.assert_allclose(found.target, expected[np.arange(24), targets], atol=0.01)
    assert (found.top_id == expected.argmax(-1)).mean() > 0.9
    assert np.isnan(found.other).all()


def test_heads_that_are_tied_scaled_or_capped(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    weight, state = torch.randn(50, 16, generator=rng), torch.randn(6, 16, generator=rng)
    save_file({"model.embed_tokens.weight": weight}, tmp_path / "model.safetensors")
    config = {"model_type": "gemma2", "final_logit_softcapping": 2.0, "logits_scaling": 4.0, "hidden_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    head = Head(Checkpoint(tmp_path), 50)
    assert head.name == "model.embed_tokens.weight"
    expected = torch.log_softmax(torch.tanh(state @ weight.T / 4 / 2) * 2, -1)
    found = head.logprobs(state.numpy(), "float32", np.arange(6), np.arange(6)[::-1].copy())
    np.testing.assert_allclose(found.target, expected[range(6), range(6)].numpy(), atol=1e-5)
    np.testing.assert_allclose(found.other, expected[range(6), range(5, -1, -1)].numpy(), atol=1e-5)
    assert HeadSettings.of({"model_type": "cohere", "logit_scale": 0.5}).scale == 0.5


def test_fp8_weights_are_dequantized_by_their_blocks(tmp_path: Path) -> None:
    values = torch.randn(256, 130, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [0.5, 4.0]])
    save_file({"a.weight": values, "a.weight_scale_inv": scale, "b.weight": values.clone()}, tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint(tmp_path)
    expected = values.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :130]
    np.testing.assert_array_equal(checkpoint.whole("a.weight"), expected.numpy())
    with pytest.raises(InputError, match=r"b.weight is fp8 without a scale"):
        checkpoint.whole("b.weight")


def test_checkpoints_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"its config.json cannot be read"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(InputError, match="holds no safetensors weights"):
        Checkpoint(tmp_path)
    (tmp_path / "m.safetensors").write_bytes(b"no tensors here, but some text")
    with pytest.raises(InputError, match="is no safetensors file"):
        Checkpoint(tmp_path)
    save_file({"x": torch.zeros(2)}, tmp_path / "m.safetensors")
    with pytest.raises(InputError, match="neither an lm_head nor embeddings"):
        Head(Checkpoint(tmp_path), 10)
    with pytest.raises(InputError, match="builds no model of type 'no-such-model'"):
        StreamingReference(Checkpoint(tmp_path))


def test_rows_are_found_where_they_went() -> None:
    rng = np.random.default_rng(0)
    right, other = (rng.standard_normal((40, 32)).astype(np.float32) for _ in range(2))
    shifted = np.roll(right, 3, axis=0)
    rows = np.arange(40)
    assert find_moves(shifted, right, rows)[0] == Move(3, 39, 0)
    assert find_moves(right, right, rows) == []
    assert find_moves(other, right, rows) == []
    assert str(find_moves(right[10:20], right, np.arange(10), "k")[0]) == "rows 0..9 are rows 10..19 of sample k"


def test_a_norm_between_two_states_is_recognized() -> None:
    rng = np.random.default_rng(0)
    raw = rng.standard_normal((30, 64)).astype(np.float32) * 3
    normed = raw / np.sqrt(np.square(raw).mean(1, keepdims=True)) * rng.uniform(0.5, 2, 64).astype(np.float32)
    assert norm_apart(raw, normed)
    assert not norm_apart(rng.standard_normal((30, 64)).astype(np.float32), normed)


def test_states_that_went_through_float16_are_told_from_bfloat16() -> None:
    values = np.random.default_rng(0).standard_normal((2000, 256)).astype(np.float32) * 0.02
    clean, rounded = GridEvidence(), GridEvidence()
    clean.add("final", from_float32(values, "bfloat16"))
    rounded.add("final", from_float32(values.astype(np.float16).astype(np.float32), "bfloat16"))
    assert not clean.is_float16
    assert rounded.is_float16
    assert rounded.is_float16_beside(clean)
    assert not clean.is_float16_beside(rounded)


def test_differences_of_larger_values_are_not_taken_for_float16() -> None:
    """What a residual stream's tiniest values mostly are: few bits, on float16's grid and coarser ones."""
    rng = np.random.default_rng(0)
    one, other = (from_float32(rng.standard_normal((9000, 256)).astype(np.float32) * 0.004, "bfloat16") for _ in "ab")
    sums = GridEvidence()
    sums.add("layer1", from_float32(to_float32(one, "bfloat16") + to_float32(other, "bfloat16"), "bfloat16"))
    assert sums.tiny > 40, "enough to be taken in, were all their bits believed in"
    assert not sums.is_float16


def probe(
    path: Path, hidden: list[torch.Tensor], claimed: tuple[int, ...], real: tuple[int, ...], **changes: Any
) -> Any:
    """Probe states that claim to be one thing and are another."""
    checkpoint, depth = Checkpoint(path), len(hidden) - 1
    shape = StateShape(layers=claimed, hidden_size=256, dtype="bfloat16", final_state="post_norm")
    info = EngineInfo(
        engine="transformers",
        engine_version="5",
        attach="embedded",
        hsdump_version="0",
        model_path=str(path),
        model_class=checkpoint.raw_config["architectures"][0],
        num_layers=depth,
        vocab_size=2048,
        context_length=4096,
        shape=shape,
        device="cpu",
        engine_layers=claimed,
    )
    states = {f"layer{name}": hidden[index] for name, index in zip(claimed, real, strict=True)}
    states["final"] = changes.get("final", hidden[-1])
    head = Head(checkpoint, 2048)
    answers = {}
    for row in range(2):
        next_ids = np.append(IDS[row, 1:], 5)
        said = head.logprobs(bits(hidden[-1][row]), "bfloat16", next_ids, next_ids)
        answers[f"{row}"] = Answer(
            logprobs=said.target,
            next_ids=next_ids,
            top_ids=said.top_id,
            top_logprobs=said.target,
            told=np.ones(24, np.bool_),
            states={name: bits(state[row]) for name, state in states.items()},
        )
    captured = Captured(
        ids=IDS, states={name: state.float().numpy() for name, state in states.items()}, answers=answers
    )
    return Prober(info, str(changes.get("model", path))).judge(captured)


def test_the_probe_names_what_each_state_is(oracle: tuple[Path, list[torch.Tensor], torch.Tensor]) -> None:
    path, hidden, _ = oracle
    report = probe(path, hidden, (2, 3, 4), (2, 3, 4))
    assert (report.verdict, report.words) == ("agrees", [])
    assert [one.found for one in report.states] == ["2", "3", "4", "final"]
    shifted = probe(path, hidden, (2, 3, 4), (3, 4, 5))
    assert shifted.verdict == "contradicts"
    assert shifted.words[0].startswith("layer2: the capture claims hidden_states[2], the numbers say 3")
    assert "by hsdump's table they are [2, 3, 4], by the numbers [3, 4, 5]" in shifted.words[-1]
    assert probe(path, hidden, (1, 3), (0, 3)).states[0].found == "0", "the embedding rows are recognized"
    assert probe(path, hidden, (2, 4), (2, 4), final=hidden[-2]).verdict == "contradicts"


def other_checkpoint(path: Path, out: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """Copy a checkpoint with a change of its config and tensors."""
    shutil.copytree(path, out)
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    change(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    return out


def test_the_probe_says_what_is_wrong_with_a_checkpoint_or_states(
    oracle: tuple[Path, list[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    path, hidden, _ = oracle

    def words(name: str, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> tuple[str, str]:
        report = probe(path, hidden, (2, 3), (2, 3), model=other_checkpoint(path, tmp_path / name, change))
        return report.verdict, " ".join(report.words)

    def pack(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        config["quantization_config"] = {"quant_method": "gptq"}
        for name in [name for name in tensors if "o_proj.weight" in name]:
            tensors[name.replace("weight", "qweight")] = tensors.pop(name).to(torch.int32)

    verdict, said = words("packed", pack)
    assert verdict == "can't"
    assert "its weights are quantized (gptq)" in said
    assert said.endswith("not identified: layer2, layer3"), "nothing more can be walked, so no advice to"
    if "gemma3" not in str(path):  # its head is its embeddings
        said = words("headless", lambda _, t: t.pop("lm_head.weight"))[1]
        assert "holds no lm_head, which its config says it has" in said
    other_class = words("class", lambda config, _: config.update(architectures=["OtherForCausalLM"]))
    assert other_class[0] == "agrees"
    assert "names ['OtherForCausalLM']" in other_class[1]
    with pytest.raises(InputError, match="has 3 of width 256: it is another model's checkpoint"):
        words("shallow", lambda config, _: config.update(num_hidden_layers=3))
    broken = [*hidden]
    broken[3] = hidden[3].clone()
    broken[3][1, 5, 7] = float("nan")
    report = probe(path, broken, (2, 3), (2, 3))
    assert (report.verdict, report.words[0]) == ("contradicts", "layer3 holds NaN or infinity in 1 of 48 rows")


def test_a_layer_that_lacks_a_part_of_its_sum_is_not_settled_by_order(
    oracle: tuple[Path, list[torch.Tensor], torch.Tensor],
) -> None:
    """A partial sum of one tensor-parallel rank lies between its neighbours, and is still not the layer."""
    path, hidden, _ = oracle
    partial = [*hidden]
    partial[3] = hidden[2] + 0.6 * (hidden[3] - hidden[2])
    report = probe(path, partial, (2, 3, 4), (2, 3, 4))
    assert (report.verdict, report.states[1].found) == ("can't", None)
    assert "not identified: layer3" in report.words[-1]


def test_parts_of_a_hidden_state_are_named(oracle: tuple[Path, list[torch.Tensor], torch.Tensor]) -> None:
    """What an engine's own capture hands out where sums are made in the next layer's norm, in place or not."""
    path, hidden, _ = oracle
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    before, after = model.model.layers[1:3]
    in_gemma = "gemma3" in str(path)
    seen: dict[str, torch.Tensor] = {"2 without its residual, all of it": hidden[2] - hidden[1]}

    def see(name: str, module: torch.nn.Module, *, reads: bool = False) -> None:
        module.register_forward_hook(
            lambda _module, inputs, output: seen.update({name: inputs[0] if reads else output})
        )

    see("2 without its residual", before.post_feedforward_layernorm if in_gemma else before.mlp)
    see("2 behind the next norm", after.input_layernorm)
    second = after.pre_feedforward_layernorm if in_gemma else after.post_attention_layernorm
    see("2 and the next attention", second, reads=True)
    with torch.no_grad():
        model(torch.tensor(IDS), use_cache=False)
    assert len(seen) == 4
    for name, part in seen.items():
        report = probe(path, [*hidden[:2], part.reshape(hidden[2].shape), *hidden[3:]], (2, 3, 4), (2, 3, 4))
        assert (report.verdict, report.states[0].found) == ("contradicts", name.split(",")[0])
        assert report.states[0].error < 0.02, "bit for bit but for the order of sums in a batch"
        assert "sglang/pull/39286" in " ".join(report.words)


def test_layers_that_do_not_run_here_leave_the_probe_without_an_answer(
    oracle: tuple[Path, list[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("The size of tensor a (2) must match\nand more")

    monkeypatch.setattr(StreamingReference, "run", fails)
    path, hidden, _ = oracle
    report = probe(path, hidden, (2, 3), (2, 3))
    assert report.verdict == "can't"
    assert (
        "the checkpoint's layers cannot be run here: RuntimeError: The size of tensor a (2) must match" in report.words
    )


def test_a_norm_with_a_bias_is_read_with_it(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.StableLmConfig(
        vocab_size=2048, hidden_size=64, intermediate_size=96, num_hidden_layers=3, **heads
    )
    model = transformers.StableLmForCausalLM(config).eval()
    torch.nn.init.normal_(model.model.norm.bias)
    model.save_pretrained(tmp_path)
    reference = StreamingReference(Checkpoint(tmp_path))
    with torch.no_grad():
        expected = model(torch.tensor(IDS), output_hidden_states=True, use_cache=False).hidden_states[-1]
    torch.testing.assert_close(reference.run(reference.embed(IDS), 0, 3)[3], expected)


def write(path: Path, samples: list[Made], **changes: object) -> Path:
    with StoreWriter.open(path, make_manifest(**changes)) as writer:
        for one in samples:
            writer.add(one.sample, one.states)
        writer.commit()
    return path


def test_compare_says_what_is_different(tmp_path: Path) -> None:
    made = [make_sample(seed, make_manifest(hidden_size=64), num_tokens=40) for seed in range(5)]
    clean = write(tmp_path / "clean", made, hidden_size=64)

    def changed(name: str, states: Any) -> list[str]:
        path = write(
            tmp_path / name,
            [Made(one.sample, tuple(states(at, one.states))) for at, one in enumerate(made)],
            hidden_size=64,
        )
        report = compare_stores(path, clean)
        assert report.exit_code == (1 if report.verdict != "same" else 0)
        return report.words

    assert changed("copied", lambda _at, s: s)[0].startswith("the same bit for bit")
    rounded = changed("same", lambda _at, s: [x ^ 1 for x in s])
    assert rounded[0].startswith("the same up to rounding")
    assert changed("order", lambda _at, s: (s[1], s[0], s[2]))[0].startswith("layer2 of A is layer4 of B")
    moved = changed("moved", lambda at, s: [np.roll(x, 2, axis=0) for x in s] if at == 3 else s)
    assert moved[0].startswith("1 of 5 samples differ by more than rounding")
    assert moved[1].startswith("rows were moved: rows 2..39 are rows 0..37 of the other capture (sample ")
    everywhere = changed("everywhere", lambda _at, s: [np.roll(x, 2, axis=0) for x in s])
    assert everywhere[-1] == "rows were moved: rows 2..39 are rows 0..37 of the other capture (final)"
    nan = changed("nan", lambda at, s: [np.where(np.arange(x.size).reshape(x.shape) == at, 0x7FC0, x) for x in s])
    assert nan[0] == "layer2 of A holds NaN or infinity in 5 of 200 rows"


def test_compare_as_a_command_with_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one", [make_sample(seed) for seed in range(3)])
    other = write(tmp_path / "other", [make_sample(seed) for seed in range(1, 4)], engine_version="0.5.11")
    page = tmp_path / "page.html"
    assert main(["compare", str(one), str(other), "--html", str(page), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], report["only_a"], report["only_b"]) == (2, 1, 1)
    assert report["facts"] == ["engine_version: A '0.5.23', B '0.5.11'"]
    assert "Which state of B is each state of A" in page.read_text(encoding="utf-8")
    assert main(["compare", str(one), str(other)]) == 0
    assert "the same bit for bit" in capsys.readouterr().out
    assert main(["compare", str(one), str(other), "--html", str(tmp_path / "no" / "page.html")]) == 64
    assert "cannot be written" in capsys.readouterr().err


def test_tokens_of_another_template_or_tokenizer_are_told(tiny_llama: Path) -> None:
    checker = TextChecker.load(str(tiny_llama), None)
    assert checker.header, "the template's header of an answer was found"
    encode = checker.renderer.tokens.encode
    question = "<|im_start|>user\nHow many legs does a spider have?<|im_end|>\n"
    parts = [(question + "<|im_start|>assistant\n", 0), (ANSWER * 4 + "<|im_end|>", 1)]

    def sample(pieces: list[tuple[str, int]]) -> tuple[str, Any, Any]:
        ids = [encode(text, add_special_tokens=False)[0] for text, _ in pieces]
        mask = [np.full(len(piece), learned, np.uint8) for piece, (_, learned) in zip(ids, pieces, strict=True)]
        return "k", np.concatenate(ids), np.concatenate(mask)

    assert checker.check([sample(parts)]).problems == []
    bare = sample([("### User: How many?\n### Assistant: ", 0), ("Eight.", 1)])
    assert "another chat template" in checker.check([bare]).problems[0]
    key, ids, mask = sample(parts)
    assert "another tokenizer" in checker.check([(key, np.where(ids > 2, ids + 1, ids), mask)]).problems[0]


def test_prove_names_another_width_and_states_that_hold_no_numbers(tiny_llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        hidden = model(torch.tensor(IDS[:1]), output_hidden_states=True, use_cache=False).hidden_states
    states = {"layer2": bits(hidden[2][0]), "final": bits(hidden[-1][0])}
    manifest = make_manifest(hidden_size=256, vocab_size=2048, layers=[2])
    sample = TokenSample.make("one", IDS[0], np.ones(24, np.uint8))
    ids = np.append(IDS[0, 1:], 5)
    said = Head(Checkpoint(tiny_llama), 2048).logprobs(states["final"], "bfloat16", ids, ids)
    told = np.ones(24, np.bool_)
    answer = Answer(
        logprobs=said.target, next_ids=ids, top_ids=said.top_id, top_logprobs=said.target, told=told, states=states
    )

    def judged(name: str, final: Any, served: StateShape | None = None, model: Path = tiny_llama) -> ProofReport:
        with StoreWriter.open(tmp_path / name, manifest) as writer:
            writer.add(sample, [states["layer2"], final])
            writer.commit()
        with Store(tmp_path / name) as store:
            prover = Prover(manifest, str(model), text=False)
            return prover.judge(store.__getitem__, {sample.key: answer}, served)

    assert judged("sound", states["final"]).verdict == "proved"
    broken = states["final"].copy()
    broken[3, 1] = 0x7F80
    report = judged("infinite", broken)
    assert (report.verdict, report.words[1]) == (
        "not proved",
        "final of the store holds NaN or infinity in 1 of 24 rows",
    )
    narrow = StateShape(layers=(2,), hidden_size=128, dtype="bfloat16", final_state="post_norm")
    words = judged("narrow", states["final"], narrow).words
    assert words[0] == "the server's states are 128 wide, the store's 256: another model"
    pre_norm = StateShape(layers=(2,), hidden_size=256, dtype="bfloat16", final_state="pre_norm")
    report = judged("pre-norm", states["final"], pre_norm)
    assert (report.verdict, report.states_unknown) == ("proved", "the server does not capture final")


class NoCapture:
    """A server that says log-probabilities and has no states to give; with them it captures."""

    facts: ClassVar[dict[str, str]] = {"model_path": "", "version": "0"}
    info = None
    failures: ClassVar[dict[str, str]] = {}
    no_capture = "the server captures nothing"

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    async def ask_all(self, asked: Sequence[tuple[str, Any]], _tick: Callable[[], None]) -> dict[str, Answer]:
        return {key: self.answer for key, _ in asked}


def test_a_server_without_the_stores_layers_proves_in_part_and_takes_no_proof_away(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        hidden = model(torch.tensor(IDS[:1]), output_hidden_states=True, use_cache=False).hidden_states
    states = {"layer2": bits(hidden[2][0]), "final": bits(hidden[-1][0])}
    ids = np.append(IDS[0, 1:], 5)
    said = Head(Checkpoint(tiny_llama), 2048).logprobs(states["final"], "bfloat16", ids, ids)
    whole = Answer(
        logprobs=said.target,
        next_ids=ids,
        top_ids=said.top_id,
        top_logprobs=said.target,
        told=np.ones(24, np.bool_),
        states=states,
    )
    path, sample = tmp_path / "store", TokenSample.make("one", IDS[0], np.ones(24, np.uint8))
    manifest = make_manifest(hidden_size=256, vocab_size=2048, layers=[2])
    with StoreWriter.open(path, manifest) as writer:
        writer.add(sample, [states["layer2"], states["final"]])
        writer.commit()

    def proved(answer: Answer) -> tuple[str, int, str]:
        monkeypatch.setattr(Witness, "meet", lambda _url, **_options: NoCapture(answer))
        report = prove_store(path, "http://nowhere", ProveOptions(model=str(tiny_llama), text=False))
        with Store(path) as store:
            return report.verdict, report.exit_code, proof_standing(store)

    blind = replace(whole, states=None)
    only_final = replace(whole, states={"final": states["final"]})
    assert proved(blind) == ("proved in part", 2, "proved in part")
    with pytest.raises(StoreError, match=r"not proved to be the server's \(proved in part\)"):
        check_store(path, unproved=False)
    assert proved(only_final) == ("proved in part", 2, "proved in part")
    assert proved(whole) == ("proved", 0, "proved")
    assert proved(blind) == ("proved in part", 2, "proved")
    wrong = replace(whole, states={"layer2": np.roll(states["layer2"], 1, axis=0), "final": states["final"]})
    assert proved(wrong) == ("not proved", 1, "not proved")
