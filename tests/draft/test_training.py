"""Training: attention of the training-time test, the same weights after kills, what is refused, what comes out."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from hsdump.draft.attention import ByDocument, Flex, ttt_attention
from hsdump.draft.begin import build, check_store
from hsdump.draft.chain import DraftRunner
from hsdump.draft.checkpoints import STEPS, WEIGHTS, load_drafter, load_tensors, pointed
from hsdump.draft.export import export_drafter
from hsdump.draft.foreign import read_drafter
from hsdump.draft.loss import shift, step_mask
from hsdump.draft.model import Drafter, Inputs, Norm
from hsdump.draft.target import Target
from hsdump.draft.train import train
from hsdump.draft.vocab import DraftVocab, load_vocab, save_vocab
from hsdump.errors import InputError, StoreError, UsageError
from hsdump.store import Store
from hsdump.verify.proof_file import PROOF_NAME, store_digest
from tests.draft.making import LAYERS, SMALL, VOCAB, make_store, make_target, make_vocab, sources_in


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with target, store and a trained drafter."""
    torch.set_num_threads(1)  # as the children that are killed: sums in the same order
    folder = tmp_path_factory.mktemp("trained")
    found = train(sources_in(folder), SMALL, quiet=True)
    assert found.finished == "all steps done"
    return folder


def drafter_in(folder: Path) -> Drafter:
    return load_drafter(folder / "drafter")[0]


@pytest.mark.parametrize("groups", [1, 2])
def test_attention_sees_the_states_up_to_a_token_and_its_own_guesses(groups: int) -> None:
    """Against the definition, written out with loops."""
    torch.manual_seed(0)
    lengths, heads, width, steps = [5, 1, 7], 2, 8, 4
    total = sum(lengths)
    q = torch.randn(heads * groups, total, width)
    keys, values = ([torch.randn(heads, total, width) for _ in range(steps)] for _ in range(2))
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    expected = torch.zeros_like(q)
    for head in range(heads * groups):
        for row in range(total):
            seen = [at for at in range(row + 1) if documents[at] == documents[row]]
            parts = [(keys[0][head // groups, at], values[0][head // groups, at]) for at in seen]
            parts += [
                (key[head // groups, row], value[head // groups, row])
                for key, value in zip(keys[1:], values[1:], strict=True)
            ]
            scores = torch.stack([q[head, row] @ key * width**-0.5 for key, _ in parts])
            expected[head, row] = torch.softmax(scores, 0) @ torch.stack([value for _, value in parts])
    found = ttt_attention(q, keys, values, ByDocument(lengths))
    torch.testing.assert_close(found, expected)  # float32 in another order: torch's own tolerance


@pytest.mark.filterwarnings("ignore")  # flex attention without compilation warns about its speed
def test_flex_attention_is_the_same_function() -> None:
    torch.manual_seed(0)
    lengths = [70, 30, 28]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    q = torch.randn(4, 128, 16)
    keys, values = ([torch.randn(2, 128, 16) for _ in range(3)] for _ in range(2))
    with torch.no_grad():  # its backward runs on a GPU only
        one, other = (ttt_attention(q, keys, values, causal) for causal in (ByDocument(lengths), Flex(documents)))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_norms_keep_the_precision_of_their_input() -> None:
    torch.manual_seed(0)
    norm, plain = Norm(64, eps=1e-6), torch.nn.RMSNorm(64, eps=1e-6)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.1 * torch.randn(64))
        plain.weight.copy_(norm.weight)
    x = torch.randn(7, 64)
    assert torch.equal(norm(x), plain(x))
    rounded = norm(x.bfloat16())
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), plain(x.bfloat16().float()), rtol=2**-6, atol=0)  # three roundings
    rounded.float().sum().backward()
    assert norm.weight.grad is not None
    assert norm.weight.grad.dtype == torch.float32


def test_step_masks_stay_inside_documents() -> None:
    documents = torch.tensor([0, 0, 0, 1, 1])
    mask = torch.tensor([True, True, True, True, True])
    assert step_mask(mask, documents, 1).tolist() == [True, True, False, True, False]
    assert step_mask(mask, documents, 2).tolist() == [True, False, False, False, False]
    assert shift(torch.arange(5), 2).tolist() == [2, 3, 4, 0, 0]


def test_training_and_drafting_compute_the_same(trained: Path) -> None:
    """One row of the unrolled pass is what a chain of drafts from that token gives."""
    drafter = drafter_in(trained)
    torch.manual_seed(1)
    ids = torch.randint(0, VOCAB, (9,))
    aux = torch.randn(8, 3 * drafter.config.hidden_size)
    inputs = Inputs(
        input_ids=ids[1:],
        aux=aux,
        position_ids=torch.arange(8),
        document_ids=torch.zeros(8, dtype=torch.int64),
        lengths=torch.tensor([8]),
    )
    with torch.inference_mode():
        unrolled = [drafter.lm_head(normed) for normed in drafter.unroll(inputs, 3, ByDocument([8]))]
        runner = DraftRunner(drafter)
        state = runner.read(ids[1:5].tolist(), aux[:4])
        chain = [drafter.lm_head(drafter.norm(state))[0]]
        keys, values = runner.keys, runner.values
        for step in range(2):
            state, keys, values = runner._layer([int(ids[5 + step])], state, keys, values, 4 + step)
            chain.append(drafter.lm_head(drafter.norm(state))[0])
    for one, other in zip(unrolled, chain, strict=True):
        torch.testing.assert_close(one[3], other, rtol=1e-4, atol=1e-4)


def test_it_learns(trained: Path) -> None:
    with (trained / "drafter/progress.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]]
    assert float(rows[-1]["loss"]) < 0.8 * float(rows[0]["loss"])
    assert [int(row["step"]) for row in rows] == sorted({int(row["step"]) for row in rows})


def test_the_same_command_again_changes_nothing(trained: Path) -> None:
    place = pointed(trained / "drafter", "last")
    assert place is not None
    before = (place / WEIGHTS).read_bytes()
    train(sources_in(trained), SMALL, quiet=True)
    assert (place / WEIGHTS).read_bytes() == before


def test_other_settings_are_no_resume(trained: Path) -> None:
    with pytest.raises(UsageError, match=r"begun with other settings:\n    lr: begun with 0.005, now 0.1"):
        train(sources_in(trained), msgspec.structs.replace(SMALL, lr=0.1), quiet=True)


def test_killed_five_times_the_weights_are_the_same(trained: Path) -> None:
    """Moments are chosen by checkpoints that show up, so that each kill hits another part of the training."""
    folder = trained / "killed"
    words = [sys.executable, "-m", "tests.draft.train_child", str(trained), "killed"]
    kills = 0
    for moment in range(5):
        with subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"}) as child:
            seen = _steps(folder)
            while child.poll() is None and _steps(folder) == seen:
                time.sleep(0.005)
            if child.poll() is None:
                time.sleep(0.02 * moment)
                child.send_signal(signal.SIGKILL)
                kills += 1
    assert kills >= 4  # the last one may come after the end
    train(sources_in(trained, "killed"), SMALL, quiet=True)
    ends = [pointed(trained / name, "last") for name in ("drafter", "killed")]
    assert ends[0] is not None
    assert ends[1] is not None
    one, other = (load_tensors(end / WEIGHTS) for end in ends)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    curves = [_curve(trained / name / "progress.csv") for name in ("drafter", "killed")]
    assert curves[0] == curves[1]
    assert not list((folder / STEPS).glob("*.partial"))


def _steps(folder: Path) -> set[str]:
    return {path.name for path in (folder / STEPS).glob("step-*") if path.suffix != ".partial"}


def _curve(path: Path) -> list[tuple[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return [(row["step"], row["loss"]) for row in csv.DictReader(file) if row["loss"]]


def test_ranks_learn_what_one_process_does(trained: Path, tmp_path: Path) -> None:
    """Two processes of half the batch each take the same number of samples; the loss falls alike."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += ["-m", "tests.draft.train_child", str(trained), "ranks"]
    subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    curve = _curve(trained / "ranks/progress.csv")
    assert float(curve[-1][1]) < 0.9 * float(curve[0][1])
    assert load_drafter(trained / "ranks")[1]["checkpoint"]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_export_comes_back_as_the_same_drafter(trained: Path, tmp_path: Path, engine: str) -> None:
    out = tmp_path / engine
    found = export_drafter(trained / "drafter", out, engine)  # type: ignore[arg-type]  # a parameter
    config = msgspec.json.decode((out / "config.json").read_bytes())
    ids = [1, 3, 4] if engine == "sglang" else [2, 4, 5]
    assert found.engine_layers == ids
    if engine == "sglang":
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == ids
    else:
        assert config["eagle_aux_hidden_state_layer_ids"] == ids
        assert config["norm_before_residual"] is False
    layer = config.get("transformer_layer_config", config)
    assert layer["max_position_embeddings"] == 256
    tensors = load_tensors(out / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert "embed_tokens.weight" not in tensors
    drafter = drafter_in(trained)
    target = Target(trained / "target")
    _, _, facts = build(sources_in(trained), SMALL)
    plain = msgspec.to_builtins(facts["config"])
    known = {
        name: plain[name]
        for name in ("vocab_size", "draft_vocab_size", "layers", "num_target_layers", "target_class", "target_path")
    }
    _, again = read_drafter(out, target, drafter.vocab, {**known, "target_digest": "", "store_engine": ""})
    for (name, one), (_, other) in zip(drafter.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one.to(torch.bfloat16), other.to(torch.bfloat16)), name


def test_a_variant_of_the_layer_is_not_taken_for_ours(trained: Path, tmp_path: Path) -> None:
    """vLLM and speculators take a config that does not speak of norm_before_residual for true."""
    out = tmp_path / "x"
    export_drafter(trained / "drafter", out, "vllm")
    config = msgspec.json.decode((out / "config.json").read_bytes())
    del config["norm_before_residual"]
    (out / "config.json").write_bytes(msgspec.json.encode(config))
    drafter = drafter_in(trained)
    with pytest.raises(InputError, match="another kind of EAGLE-3: norm_before_residual"):
        read_drafter(out, Target(trained / "target"), drafter.vocab, {})


def test_a_drafter_keeps_its_mapping(trained: Path, tmp_path: Path) -> None:
    """SpecForge#534: d2t was made again for a fine-tuning; acceptance collapsed and training looked fine."""
    other = tmp_path / "other.safetensors"
    save_vocab(DraftVocab.of(range(30, 90), VOCAB), other)
    changed = sources_in(trained, "more", vocab=other, from_drafter=trained / "drafter")
    with pytest.raises(UsageError, match=r"is not the mapping that .* was trained with"):
        train(changed, SMALL, quiet=True)
    kept = sources_in(trained, "more", from_drafter=trained / "drafter")
    train(kept, msgspec.structs.replace(SMALL, max_steps=1), quiet=True)
    own = load_vocab(trained / "drafter/vocab.safetensors")
    assert load_vocab(trained / "more/vocab.safetensors").digest == own.digest


def test_a_drafter_without_its_mapping_is_refused(trained: Path, tmp_path: Path) -> None:
    """Automodel#2447: without d2t vLLM takes the first ids, silently."""
    from safetensors.torch import save_file

    from hsdump.draft.foreign import read_vocab

    export_drafter(trained / "drafter", tmp_path / "x", "sglang")
    tensors = load_tensors(tmp_path / "x/model.safetensors")
    del tensors["d2t"]
    save_file(tensors, tmp_path / "x/model.safetensors")
    with pytest.raises(InputError, match="proposes 60 tokens and holds no d2t"):
        read_vocab(tmp_path / "x", VOCAB)


def test_states_that_nobody_vouches_for_are_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", make_target(tmp_path / "target"), engine="sglang")
    with pytest.raises(StoreError, match="its states are not proved to be the server's"):
        check_store(store, unproved=False)
    assert any("trained all the same" in note for note in check_store(store, unproved=True))


def test_embedded_states_are_taken_unless_a_proof_says_that_they_are_not_the_servers(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", make_target(tmp_path / "target"))
    with Store(path) as store:
        digests = {"store_digest": store_digest(store), "manifest_digest": store.manifest.digest}
    check_store(path, unproved=False)
    (path / PROOF_NAME).write_text(json.dumps({"verdict": "can't", **digests}))
    check_store(path, unproved=False)
    (path / PROOF_NAME).write_text(json.dumps({"verdict": "not proved", **digests}))
    with pytest.raises(StoreError, match="not proved to be the server's"):
        check_store(path, unproved=False)


def test_final_states_before_the_norm_are_refused(tmp_path: Path) -> None:
    """speculators#313, TorchSpec#169: acceptance of 25% instead of 40%."""
    make_store(tmp_path / "store", make_target(tmp_path / "target"), final_state="pre_norm")
    make_vocab(tmp_path / "store")
    with pytest.raises(InputError, match="holds final states before the norm"):
        train(sources_in(tmp_path), SMALL, quiet=True)


def test_a_target_of_another_shape_is_refused(trained: Path, tmp_path: Path) -> None:
    other = make_target(tmp_path / "other", num_hidden_layers=9)
    with pytest.raises(InputError, match=r"has 9 layers of width 32, the store's states have 8 layers"):
        train(sources_in(trained, "wrong", model=str(other)), SMALL, quiet=True)


def test_a_tied_target_lends_its_embeddings_as_head(tmp_path: Path) -> None:
    target = Target(make_target(tmp_path / "target", tied=True))
    assert target.tied
    np.testing.assert_array_equal(target.head_rows(np.arange(3)), target.embeddings()[:3])


def test_the_targets_first_choice_is_over_its_whole_vocabulary(trained: Path) -> None:
    target = Target(trained / "target")
    final = torch.randn(50, 32)
    head = torch.from_numpy(target.head_rows(np.arange(VOCAB)))
    assert torch.equal(target.first_choices(final), (final @ head.T).argmax(-1))


def test_layers_that_the_store_lacks(trained: Path) -> None:
    with pytest.raises(UsageError, match="the store has no states layer3"):
        train(sources_in(trained, "layers"), msgspec.structs.replace(SMALL, layers=[2, 3, 5]), quiet=True)
    assert LAYERS == [2, 4, 5]


def test_no_mapping_yet(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no draft vocabulary"):
        train(sources_in(trained, "none", vocab=tmp_path / "none"), SMALL, quiet=True)
