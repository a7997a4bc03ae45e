"""A small target with weights of its own, a store of made-up states, and a drafter: for tests of the training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from hsdump.draft.begin import Sources
from hsdump.draft.counting import count_tokens
from hsdump.draft.options import TrainOptions
from hsdump.draft.vocab import choose, default_vocab, save_vocab
from hsdump.samples import TokenSample
from hsdump.store import Store, StoreWriter
from tests.store.making import make_manifest, make_states

HIDDEN, VOCAB, LAYERS, NUM_LAYERS = 32, 90, [2, 4, 5], 8


def make_target(folder: Path, *, tied: bool = False, **changes: object) -> Path:
    """Write a checkpoint with embeddings, head and norm: all that training reads of a target."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(3)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": NUM_LAYERS,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
        "model.layers.0.input_layernorm.weight": torch.ones(HIDDEN),
    }
    if not tied:
        tensors["lm_head.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def make_store(path: Path, target: Path, *, samples: int = 30, **changes: object) -> Path:
    """Commit samples whose states are random and whose tokens are few, so that there is something to learn."""
    manifest = make_manifest(
        **{
            "engine": "transformers",
            "model_path": str(target),
            "vocab_size": VOCAB,
            "layers": LAYERS,
            "hidden_size": HIDDEN,
            "num_layers": NUM_LAYERS,
            **changes,
        }
    )
    with StoreWriter.open(path, manifest) as writer:
        for seed in range(samples):
            rng = np.random.default_rng(seed)
            length = int(rng.integers(12, 30))
            ids = rng.integers(3, 40, length).astype(np.int64)
            mask = (np.arange(length) >= length // 3).astype(np.uint8)
            writer.add(TokenSample.make(f"row-{seed}", ids, mask), make_states(manifest, rng, length))
        writer.commit()
    return path


def make_vocab(store: Path, size: int = 60) -> Path:
    """Write the store's mapping where training looks for it."""
    with Store(store) as opened:
        counts = count_tokens(opened, 0.0, lambda _samples, _bytes: None)
    save_vocab(choose(counts.train, size, [0, 1, 2]), default_vocab(store))
    return default_vocab(store)


def sources_in(folder: Path, name: str = "drafter", **changes: object) -> Sources:
    """Make target, store and mapping below a folder, once, and say where the drafter goes."""
    store = folder / "store"
    if not store.exists():
        make_store(store, make_target(folder / "target"))
        make_vocab(store)
    return Sources(store=store, out=folder / name, unproved=True, **changes)  # type: ignore[arg-type]  # by name


SMALL = TrainOptions(
    ttt_steps=3,
    tokens=96,
    epochs=3,
    warmup=2,
    lr=5e-3,
    held_out=0.2,
    validate_every=8,
    save_every=3,
    log_every=1,
    device="cpu",
)
"""About 20 steps of a second in all."""
