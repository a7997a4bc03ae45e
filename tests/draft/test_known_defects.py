"""What went wrong in other trainers and exports, tried on ours. docs/drafter.md lists where the others are tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hsdump.draft.begin import build
from hsdump.draft.checkpoints import load_drafter, load_tensors
from hsdump.draft.config import DrafterConfig, Widths
from hsdump.draft.data import align
from hsdump.draft.export import export_drafter
from hsdump.draft.loss import kl, shift, step_mask
from hsdump.draft.model import Drafter
from hsdump.draft.target import Target
from hsdump.draft.train import train
from hsdump.draft.unrolled import Unrolled, make_causal, step_counts
from hsdump.draft.vocab import DraftVocab
from hsdump.layers import ids_for
from hsdump.torch import HiddenStateDataset, Packer
from tests.draft.making import HIDDEN, LAYERS, SMALL, VOCAB, sources_in


def packed_rows(*documents: tuple[list[int], list[int]]) -> dict[str, Any]:
    """Pack documents (ids, mask) whose states say which token of which document they belong to."""
    ids = [token for document, _ in documents for token in document]
    lengths = [len(document) for document, _ in documents]
    states = torch.tensor(ids, dtype=torch.float32)[:, None].expand(-1, HIDDEN)
    return {
        "input_ids": torch.tensor(ids),
        "loss_mask": torch.tensor([bit for _, mask in documents for bit in mask], dtype=torch.bool),
        "document_ids": torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(lengths)),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        "lengths": torch.tensor(lengths),
        "states": {"final": states, **{f"layer{layer}": states + layer / 10 for layer in LAYERS}},
    }


def test_masks_and_labels_are_shifted_with_the_inputs() -> None:
    """SpecForge#885: the mask was not moved with the inputs. SpecForge#455, #473: labels of the wrong token."""
    packed = packed_rows(([10, 11, 12, 13, 14], [0, 0, 1, 1, 1]), ([20, 21, 22], [0, 1, 1]))
    batch = align(packed, LAYERS, torch.device("cpu"))
    assert batch.inputs.input_ids.tolist() == [11, 12, 13, 14, 21, 22]
    of_the_token_before = [10, 11, 12, 13, 20, 21]
    assert batch.inputs.aux[:, 0].tolist() == pytest.approx([token + LAYERS[0] / 10 for token in of_the_token_before])
    assert batch.inputs.aux[:, -1].tolist() == pytest.approx([token + LAYERS[-1] / 10 for token in of_the_token_before])
    assert batch.final[:, 0].tolist() == [11, 12, 13, 14, 21, 22], "the target's guess behind the row's own token"
    assert batch.next_ids.tolist() == [12, 13, 14, -1, 22, -1]
    # Learned where the row's token and the one it guesses are the target's own: a server drafts nowhere else.
    assert batch.mask.tolist() == [False, True, True, False, True, False]


def test_the_batches_of_a_store_have_these_columns(tmp_path: Path) -> None:
    """The same with the real reader: what `packed_rows` makes is what `Packer` gives."""
    dataset = HiddenStateDataset(sources_in(tmp_path).store)
    shape = dataset.store.manifest.shape
    found = Packer(shape.dtype, shape.names)([dataset[0], dataset[1]])
    assert packed_rows(([1], [1])).keys() <= found.keys()
    batch = align(found, LAYERS, torch.device("cpu"))
    first = dataset[0]
    rows = len(first.input_ids) - 1
    assert batch.inputs.input_ids[:rows].tolist() == first.input_ids[1:].tolist()
    learned = np.asarray(first.loss_mask, dtype=bool)
    assert batch.mask[: rows - 1].tolist() == (learned[1:-1] & learned[2:]).tolist()


def test_embeddings_in_an_export_are_the_targets_or_the_trained_ones(tmp_path: Path) -> None:
    """TorchSpec#38: random embeddings were exported; one engine read them, the other shared the target's."""
    options = msgspec.structs.replace(SMALL, max_steps=2, widths=Widths(own_embeddings=True))
    sources = sources_in(tmp_path, "own")
    train(sources, options, quiet=True)
    theirs = torch.from_numpy(Target(tmp_path / "target").embeddings())
    own = load_drafter(tmp_path / "own")[0].embed_tokens.weight
    assert not torch.equal(own, theirs)
    for engine in ("sglang", "vllm"):
        found = export_drafter(tmp_path / "own", tmp_path / engine, engine)  # type: ignore[arg-type]  # of ENGINES
        assert found.embeddings == "own"
        tensors = load_tensors(tmp_path / engine / "model.safetensors")
        assert torch.equal(tensors["embed_tokens.weight"], own.to(torch.bfloat16))
    fresh, _, _ = build(sources_in(tmp_path, "shared"), SMALL)
    assert torch.equal(fresh.embed_tokens.weight, theirs), "frozen ones are the target's from the first step"


def test_each_engine_gets_its_own_form(tmp_path: Path) -> None:
    """sglang#18216: the speculators form is not loadable there. sglang#9135: KeyError midlayer, a wrong architecture.

    verl-SpeCo#82: ids one too high, so that the drafter was served one layer deeper than it was trained.
    """
    train(sources_in(tmp_path), msgspec.structs.replace(SMALL, max_steps=1), quiet=True)
    configs = {}
    for engine in ("sglang", "vllm"):
        export_drafter(tmp_path / "drafter", tmp_path / engine, engine)  # type: ignore[arg-type]  # of ENGINES
        configs[engine] = msgspec.json.decode((tmp_path / engine / "config.json").read_bytes())
    names = load_tensors(tmp_path / "sglang/model.safetensors").keys()
    assert "speculators_model_type" not in configs["sglang"]
    assert configs["sglang"]["architectures"] == ["LlamaForCausalLMEagle3"]
    assert {name.split(".")[0] for name in names} == {"midlayer", "fc", "norm", "lm_head", "d2t", "t2d"}
    assert configs["vllm"]["speculators_model_type"] == "eagle3"
    assert not any(name.startswith("midlayer") for name in load_tensors(tmp_path / "vllm/model.safetensors"))
    ids = configs["sglang"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert tuple(ids) == ids_for("sglang", "LlamaForCausalLM", LAYERS) == tuple(layer - 1 for layer in LAYERS)
    # SpecForge#249: 2048 positions whatever the target had, and very low acceptance behind them.
    assert configs["sglang"]["max_position_embeddings"] == 256
    assert configs["vllm"]["transformer_layer_config"]["max_position_embeddings"] == 256


@pytest.mark.parametrize("steps", [1, 4])
def test_the_loss_is_that_of_all_rows_under_the_masks(steps: int) -> None:
    """The head meets only rows that are learned from; the sums are those over all rows with the others masked out."""
    packed = packed_rows(([10, 11, 12, 13, 14, 15], [0, 1, 0, 1, 1, 1]), ([20, 21, 22], [1, 1, 1]), ([30, 31], [0, 0]))
    generator = torch.Generator().manual_seed(0)
    packed["states"] = {name: torch.randn(11, HIDDEN, generator=generator) for name in packed["states"]}
    batch = align(packed, LAYERS, torch.device("cpu"))
    config = DrafterConfig(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=64,
        vocab_size=VOCAB,
        draft_vocab_size=20,
        layers=LAYERS,
        num_target_layers=8,
        target_class="LlamaForCausalLM",
        target_path="",
        target_digest="",
    )
    drafter = Drafter(config, DraftVocab.of(range(20), VOCAB))
    head_KH = torch.randn(20, HIDDEN, generator=generator)
    causal, counts = make_causal(batch.inputs, "dense"), step_counts(batch, steps)
    with torch.inference_mode():
        found, sums = Unrolled(drafter, head_KH, steps=steps, decay=0.8, loss="kl")(batch, causal, counts)
        target_TK, total = batch.final @ head_KH.T, 0.0
        for step, normed_TH in enumerate(drafter.unroll(batch.inputs, steps, causal)):
            mask = step_mask(batch.mask, batch.inputs.document_ids, step)
            each = kl(drafter.lm_head(normed_TH), shift(target_TK, step))[mask]
            assert int(counts[step]) == int(mask.sum())
            assert float(sums[step, 0]) == pytest.approx(float(each.sum()), rel=1e-5)  # float32, another order
            total += 0.8**step * float(each.sum()) / (float(counts[step]) + 1e-5)
        assert float(found) == pytest.approx(total, rel=1e-5)
