"""Our drafter and the speculators library's: the same weights and batch give the same logits and loss.

Runs where speculators 0.9 can be imported (its trainer needs an accelerator, these classes do not); the figures of a
run are in `benchmarks/results/parity-speculators.md`. HSDUMP_PARITY_OUT names a file that the errors are written to.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hsdump.draft.config import DrafterConfig
from hsdump.draft.data import Batch
from hsdump.draft.model import Drafter, Inputs
from hsdump.draft.unrolled import Unrolled, make_causal, step_counts
from hsdump.draft.vocab import DraftVocab

core = pytest.importorskip("speculators.models.eagle3.core", reason="speculators is not installed here")

LOGIT_TOLERANCE = 1e-4
"""Absolute, on logits of size 1 to 10: both are float32, but sum attention in another order, over up to 7 steps."""

GRADIENT_TOLERANCE = 1e-4
"""Of a weight's whole gradient, relative: sums over some 100 rows and 4 steps of the logits above."""

SHAPES = [  # hidden, heads, kv heads, head width, vocabulary, draft vocabulary
    (64, 4, 2, 16, 200, 120),
    (96, 6, 6, 16, 300, 300),
    (128, 4, 1, 64, 500, 77),
]
FOUND: list[dict[str, Any]] = []


def make(shape: tuple[int, ...]) -> Drafter:
    hidden, heads, kv_heads, dim, vocab_size, draft_size = shape
    torch.manual_seed(1)
    ids = torch.randperm(vocab_size)[:draft_size].tolist()
    config = DrafterConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        rms_norm_eps=1e-5,
        rope={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=512,
        vocab_size=vocab_size,
        draft_vocab_size=draft_size,
        layers=[2, 4, 5],
        num_target_layers=8,
        target_class="LlamaForCausalLM",
        target_path="",
        target_digest="",
    )
    drafter = Drafter(config, DraftVocab.of(ids, vocab_size))
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(torch.randn_like(weight) * 0.15 if weight.ndim == 2 else 1 + 0.1 * torch.randn_like(weight))
    return drafter


def theirs(drafter: Drafter, head: torch.Tensor) -> Any:
    """Build the library's model with our weights, its norm of the final state made to do nothing."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    config = drafter.config
    layer = LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_hidden_layers=1,
        rms_norm_eps=config.rms_norm_eps,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=config.rope,
    )
    layer._attn_implementation = "eager"  # how the library is told; its flex attention needs a GPU
    settings = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=config.draft_vocab_size,
        norm_before_residual=False,
        norm_before_fc=False,
        norm_output=False,
        eagle_aux_hidden_state_layer_ids=config.layers,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    model = core.Eagle3DraftModel(settings)
    weights = dict(drafter.named_parameters())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name == "verifier_norm.weight":
                weight.fill_(1.0)
            else:
                weight.copy_(head if name == "verifier_lm_head.weight" else weights[name])
    model.verifier_norm = torch.nn.Identity()
    return model.eval()


def batch_for(drafter: Drafter, lengths: list[int]) -> Batch:
    config, total = drafter.config, sum(lengths)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = torch.rand(total) < 0.6
    for start in [sum(lengths[:number]) for number in range(len(lengths))]:
        mask[start : start + 7] = False  # there the library's later steps would learn from the next document's rows
    return Batch(
        inputs=Inputs(
            input_ids=torch.randint(0, config.vocab_size, (total,)),
            aux=torch.randn(total, 3 * config.hidden_size),
            position_ids=torch.cat([torch.arange(length) for length in lengths]),
            document_ids=documents,
            lengths=torch.tensor(lengths),
        ),
        final=torch.randn(total, config.hidden_size),
        mask=mask,
        next_ids=torch.zeros(total, dtype=torch.int64),
    )


def their_loss(model: Any, batch: Batch, steps: int, loss: str) -> torch.Tensor:
    from speculators.losses import resolve_loss_config

    name = {"kl": "kl_div", "hard": "ce", "lk": "nla", "tv": "tv"}[loss]
    _, found, _ = model(
        hidden_states=batch.inputs.aux[None],
        input_ids=batch.inputs.input_ids[None],
        document_ids=batch.inputs.document_ids[None],
        loss_mask=batch.mask[None].to(torch.bool),
        position_ids=1 + batch.inputs.position_ids[None],
        verifier_last_hidden_states=batch.final[None],
        ttt_steps=steps,
        ttt_step_loss_decay=0.8,
        loss_config=resolve_loss_config(name, "eager"),
    )
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("steps", range(1, 8))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("loss", ["kl", "hard", "lk", "tv"])
def test_same_loss_and_guesses(shape: tuple[int, ...], steps: int, loss: str) -> None:
    drafter = make(shape)
    head = torch.randn(drafter.config.draft_vocab_size, drafter.config.hidden_size) * 0.3
    batch = batch_for(drafter, [40, 23, 9, 56])
    inputs = batch.inputs
    model = theirs(drafter, head)
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0].detach()))
    with torch.no_grad():
        expected = their_loss(model, batch, steps, loss)
        hook.remove()
        causal = make_causal(inputs, "dense")
        ours = [drafter.lm_head(normed) for normed in drafter.unroll(inputs, steps, causal)]
        unrolled = Unrolled(drafter, head, steps=steps, decay=0.8, loss=loss)
        found, _ = unrolled(batch, causal, step_counts(batch, steps))
    errors = []
    for step, (one, other) in enumerate(zip(ours, seen, strict=True)):
        # Past a document's end the token fed in is the next one's here, and zeros at the very end there.
        inside = torch.zeros(len(one), dtype=torch.bool)
        inside[: len(one) - step] = True
        errors.append(float((one - other)[inside].abs().max()))
    assert max(errors) < LOGIT_TOLERANCE
    # Relative: a mean of about 100 rows of the logits above.
    assert float(found) == pytest.approx(float(expected), rel=1e-4, abs=1e-5)
    FOUND.append(
        {
            "shape": list(shape),
            "steps": steps,
            "loss": loss,
            "largest_logit_error": max(errors),
            "ours": float(found),
            "theirs": float(expected),
        }
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("loss", ["kl", "hard", "lk", "tv"])
def test_same_gradients(shape: tuple[int, ...], loss: str) -> None:
    """Ours come from a pass of their own through the head, the library's from autograd."""
    drafter = make(shape)
    head = torch.randn(drafter.config.draft_vocab_size, drafter.config.hidden_size) * 0.3
    batch = batch_for(drafter, [40, 23, 9, 56])
    model, steps = theirs(drafter, head), 4
    model.lm_head.weight.requires_grad_(True)  # the library leaves it as the target's, and ours is learned
    their_loss(model, batch, steps, loss).backward()
    unrolled = Unrolled(drafter, head, steps=steps, decay=0.8, loss=loss)
    unrolled(batch, make_causal(batch.inputs, "dense"), step_counts(batch, steps))[0].backward()
    expected = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    found = {name: weight.grad for name, weight in drafter.named_parameters() if weight.grad is not None}
    assert set(found) == set(expected) - {"embed_tokens.weight"}
    for name, gradient in found.items():
        error = (gradient - expected[name]).norm() / expected[name].norm()
        assert float(error) < GRADIENT_TOLERANCE, name


def test_write_the_figures() -> None:
    path = os.environ.get("HSDUMP_PARITY_OUT")
    if path is None:
        pytest.skip("HSDUMP_PARITY_OUT is not set")
    from importlib.metadata import version

    worst = max(row["largest_logit_error"] for row in FOUND)
    off = max(abs(row["ours"] - row["theirs"]) / abs(row["theirs"]) for row in FOUND)
    data = {
        "speculators": version("speculators"),
        "torch": torch.__version__,
        "cases": len(FOUND),
        "largest_logit_error": worst,
        "largest_relative_loss_error": off,
        "rows": FOUND,
    }
    Path(path).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
