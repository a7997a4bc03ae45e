"""How fast training is, and whether it ever waits for data: tokens/s, peak memory, share of the time spent waiting.

    python -m benchmarks.train.speed OUT.json                        the shapes of an 8B target, on a GPU
    python -m benchmarks.train.speed OUT.json --small                the same code in small, on a CPU
    python -m benchmarks.train.speed OUT.json --speculators          also prepares that library's run on the same store

Makes a store of random states (training does not care) and a checkpoint with head and embeddings only, in a folder
beside OUT. Each step's figures are in `progress.csv`; the first tenth of the steps, in which kernels are compiled, is
left out of the means.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from hsdump.draft.backend import prepare_speculators
from hsdump.draft.begin import Sources, default_vocab
from hsdump.draft.options import TrainOptions
from hsdump.draft.train import train
from hsdump.draft.vocab import DraftVocab, save_vocab
from hsdump.samples import TokenSample
from hsdump.store import Manifest, StoreWriter

BIG = {"hidden": 4096, "heads": 32, "kv": 8, "inner": 14336, "vocab": 128_256, "draft": 32_000, "length": 2048}
SMALL = {"hidden": 128, "heads": 4, "kv": 2, "inner": 256, "vocab": 2000, "draft": 800, "length": 128}


def make_target(folder: Path, shape: dict[str, int]) -> None:
    """Write what training reads of a target."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["inner"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv"],
        "num_hidden_layers": 32,
        "vocab_size": shape["vocab"],
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    names = ("model.embed_tokens.weight", "lm_head.weight")
    weights = {name: (torch.randn(shape["vocab"], shape["hidden"]) * 0.02).to(torch.bfloat16) for name in names}
    weights |= {"model.norm.weight": torch.ones(shape["hidden"], dtype=torch.bfloat16)}
    weights |= {"model.layers.0.input_layernorm.weight": torch.ones(shape["hidden"], dtype=torch.bfloat16)}
    save_file(weights, folder / "model.safetensors")


def make_store(path: Path, target: Path, shape: dict[str, int], samples: int) -> None:
    """Commit samples of one length with random states."""
    manifest = Manifest(
        engine="sglang",
        engine_version="none",
        model_path=str(target),
        model_digest="0" * 32,
        model_class="LlamaForCausalLM",
        num_layers=32,
        vocab_size=shape["vocab"],
        layers=[2, 16, 29],
        hidden_size=shape["hidden"],
        dtype="bfloat16",
        final_state="post_norm",
        layer_meaning="index into transformers' output_hidden_states",
        tokenizer_digest="0" * 32,
        template_digest="0" * 32,
        max_tokens=8192,
    )
    rng = np.random.default_rng(0)
    with StoreWriter.open(path, manifest) as writer:
        for number in range(samples):
            ids = rng.integers(0, shape["draft"], shape["length"]).astype(np.int64)
            floats = rng.standard_normal((4, shape["length"], shape["hidden"]), dtype=np.float32)
            states = (floats.view(np.uint32) >> 16).astype(np.uint16)
            mask = np.ones(len(ids), np.uint8)
            writer.add(TokenSample.make(f"row-{number}", ids, mask), tuple(states))
        writer.commit()
    save_vocab(DraftVocab.of(range(shape["draft"]), shape["vocab"]), default_vocab(path))


def figures(folder: Path) -> dict[str, Any]:
    """Give the means of the steps behind the first tenth."""
    with (folder / "progress.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["tokens_per_s"]]
    rows = rows[max(1, len(rows) // 10) :]
    return {
        "tokens_per_s": statistics.median(float(row["tokens_per_s"]) for row in rows),
        "wait_share": statistics.mean(float(row["wait_share"]) for row in rows),
        "peak_gpu_gib": max(float(row["gpu_gib"]) for row in rows),
        "steps": len(rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train.speed")
    parser.add_argument("out", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--speculators", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ttt-steps", type=int, default=7)
    parser.add_argument("--workers", type=int, default=4)
    words = parser.parse_args()
    shape = SMALL if words.small else BIG
    work = words.out.with_suffix(".work")
    shutil.rmtree(work, ignore_errors=True)
    make_target(work / "target", shape)
    make_store(work / "store", work / "target", shape, 24)
    options = TrainOptions(
        ttt_steps=words.ttt_steps,
        tokens=2 * shape["length"],
        epochs=1000,
        max_steps=words.steps,
        held_out=0.0,
        save_every=10**6,
        log_every=1,
        workers=0 if words.small else words.workers,
    )
    sources = Sources(store=work / "store", out=work / "drafter", unproved=True)
    train(sources, options)
    result = {
        "shape": shape,
        "ttt_steps": words.ttt_steps,
        "tokens_a_batch": options.tokens,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "torch": torch.__version__,
        "hsdump": figures(work / "drafter"),
    }
    if words.speculators:
        there = Sources(store=work / "store", out=work / "speculators", unproved=True)
        result["speculators_command"] = prepare_speculators(there, options).command
    words.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
