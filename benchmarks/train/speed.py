"""How fast training is, and whether it ever waits for data: tokens/s, peak memory, share of the time spent waiting.

    python -m benchmarks.train.speed OUT.json                        the shapes of an 8B target, on a GPU
    python -m benchmarks.train.speed OUT.json --small                the same code in small, on a CPU
    python -m benchmarks.train.speed OUT.json --speculators          and that library's own trainer on the same store

Makes a store of random states (training does not care) and a checkpoint with head and embeddings only, below --work.
Each step's figures are in `progress.csv`; the first tenth of the steps, in which kernels are compiled, is left out of
the means. OUT is written after each part: what fails later takes nothing of it along. README.md beside this file says
what has to be installed.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import json
import math
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from benchmarks.train import smoke
from safetensors.torch import save_file

from hsdump.draft import begin
from hsdump.draft.backend import prepare_speculators
from hsdump.draft.begin import Sources
from hsdump.draft.options import TrainOptions
from hsdump.draft.train import train
from hsdump.draft.vocab import DraftVocab, default_vocab, save_vocab
from hsdump.samples import TokenSample
from hsdump.store import Manifest, StoreWriter

BIG = {"hidden": 4096, "heads": 32, "kv": 8, "inner": 14336, "vocab": 128_256, "draft": 32_000, "length": 2048}
SMALL = {"hidden": 128, "heads": 4, "kv": 2, "inner": 256, "vocab": 2000, "draft": 800, "length": 128}
HELD_OUT = 0.05
A_BATCH = 2
"""Samples."""

THEIR_WAYS = {
    "cuda": (("simple_flex_attention", "fused"), ("simple_flex_attention", "eager"), ("eager", "eager")),
    "cpu": (("eager", "eager"),),
}
"""Attention and loss. Its own choice first; the next one only where that fails."""


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
    made = [_states(rng, shape) for _ in range(3)]  # a second of work each at these sizes, and any numbers will do
    with StoreWriter.open(path, manifest) as writer:
        for number in range(samples):
            ids = rng.integers(0, shape["draft"], shape["length"]).astype(np.int64)
            mask = np.ones(len(ids), np.uint8)
            writer.add(TokenSample.make(f"row-{number}", ids, mask), made[number % len(made)])
        writer.commit()
    save_vocab(DraftVocab.of(range(shape["draft"]), shape["vocab"]), default_vocab(path))


def _states(rng: np.random.Generator, shape: dict[str, int]) -> tuple[np.ndarray, ...]:
    floats = rng.standard_normal((4, shape["length"], shape["hidden"]), dtype=np.float32)
    return tuple((floats.view(np.uint32) >> 16).astype(np.uint16))


def samples_for(steps: int) -> int:
    """Give so many that no epoch ends before the steps do: workers read ahead anew in each epoch."""
    return math.ceil(A_BATCH * steps / (1 - 2 * HELD_OUT)) + 6


def figures(folder: Path) -> dict[str, Any]:
    """Give the means of the steps behind the first tenth."""
    with (folder / "progress.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["tokens_per_s"]]
    begins = [one["epoch"] != before["epoch"] for before, one in pairwise(rows)]
    dropped = max(1, len(rows) // 10)
    begins, rows = begins[dropped - 1 :], rows[dropped:]
    waits = [float(row["wait_share"]) for row in rows]
    return {
        "tokens_per_s": statistics.median(float(row["tokens_per_s"]) for row in rows),
        "wait_share": statistics.mean(waits),
        "wait_share_within_epochs": statistics.mean(
            wait for wait, begin in zip(waits, begins, strict=True) if not begin
        ),
        "epochs_begun": sum(begins),
        "peak_gpu_gib": max(float(row["gpu_gib"]) for row in rows),
        "steps": len(rows),
    }


def ours(work: Path, options: TrainOptions, chosen: str, shape: dict[str, int], kept: Path) -> dict[str, Any]:
    """Train with hsdump; densely where flex attention does not work. `kept`: where figures of each step go."""
    checked: dict[str, Any] = {}
    if chosen == "auto" and torch.cuda.is_available():
        checked = smoke.apart(shape["heads"], shape["kv"], shape["hidden"] // shape["heads"])
        print(f"flex attention: {checked}", flush=True)
        chosen = "flex" if checked["works"] else "dense"
    found: dict[str, Any] = {"flex_check": checked}
    for attention in dict.fromkeys((chosen, "dense")):
        out = work / f"drafter-{attention}"
        begin_s = time.monotonic()
        try:
            train(Sources(store=work / "store", out=out, unproved=True), _with(options, attention=attention))
        except Exception as error:
            traceback.print_exc()
            found[f"{attention}_failed"] = f"{type(error).__name__}: {error}"[:600]
        _free()
        if (out / "progress.csv").exists():
            shutil.copy(out / "progress.csv", kept)
        if (out / "progress.csv").exists() and len((out / "progress.csv").read_text().splitlines()) > 3:
            return {**found, **figures(out), "attention": attention, "seconds": round(time.monotonic() - begin_s, 1)}
    return found


def _with(options: TrainOptions, **changes: Any) -> TrainOptions:
    changed: TrainOptions = msgspec.structs.replace(options, **changes)
    return changed


def _free() -> None:
    """Give a GPU's memory back: the next one to be measured needs it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def theirs(work: Path, options: TrainOptions, timeout_s: float, only_loss: str = "") -> dict[str, Any]:
    """Run the library's own trainer on an export of the same store."""
    begin_s = time.monotonic()
    out = work / "speculators"
    prepared = prepare_speculators(Sources(store=work / "store", out=out, unproved=True), options)
    found: dict[str, Any] = {
        "export_seconds": round(time.monotonic() - begin_s, 1),
        "command": prepared.command.replace(str(work), "WORK"),
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for attention, loss in THEIR_WAYS[device]:
        if only_loss not in ("", loss):
            continue
        way = f"{attention}-{loss}"
        config = out / f"config-{way}.yaml"
        settings = _their_settings(Path(prepared.config), attention, loss, device)
        config.write_text(json.dumps(settings), encoding="utf-8")
        measured = out / f"steps-{way}.json"
        failed = _run_theirs(config, measured, timeout_s)
        if failed:
            found[f"{way}_failed"] = failed.replace(str(work), "WORK")
        if measured.exists():
            kept = their_figures(json.loads(measured.read_text(encoding="utf-8")))
            return {**found, **kept, "attention": attention, "loss": loss}
    return found


def _their_settings(path: Path, attention: str, loss: str, device: str) -> dict[str, Any]:
    """Change what is no matter of the drafter: one epoch, figures of each step, and what a CPU does not have."""
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    # It takes a step of each epoch that is left behind max_steps; there is enough for one.
    config["trainer"] |= {"epochs": 1, "log_freq": 1, "no_resume_from_checkpoint": True}
    config["draft"] |= {"draft_attn_impl": attention, "mask_token_id": 0}  # of other drafters; there is no tokenizer
    config["loss"]["loss_implementation"] = loss
    if device == "cpu":
        config["data"] |= {"hidden_states_dtype": "float32", "num_workers": 0}
    return config


def _run_theirs(config: Path, out: Path, timeout_s: float) -> str:
    """Give what went wrong; empty: nothing."""
    command = [sys.executable, "-m", "benchmarks.train.their_trainer", str(out), "--config", str(config)]
    log = out.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | str = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = f"not done after {timeout_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return "" if code == 0 else f"exit code {code}: {log.read_text(encoding='utf-8', errors='replace')[-1500:]}"


def their_figures(measured: dict[str, Any]) -> dict[str, Any]:
    """Give the means of the steps behind the first tenth, as of ours."""
    every = measured["steps"]
    steps = every[max(1, len(every) // 10) :] or every
    tokens = [step["tokens_per_s"] * step["step_ms"] / 1e3 for step in steps]
    seconds = steps[-1]["at_s"] - steps[0]["at_s"]
    return {
        "version": measured["speculators"],
        "tokens_per_s": statistics.median(step["tokens_per_s"] for step in steps),
        "tokens_per_s_by_the_clock": sum(tokens[1:]) / seconds if seconds else 0.0,
        "wait_share": statistics.mean(step["fetch_frac"] for step in steps),
        "peak_gpu_gib": measured["peak_gpu_gib"],
        "steps": len(steps),
        "loss_first_last": [every[0]["loss"], every[-1]["loss"]],
    }


def ratios(mine: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Ours over theirs."""
    names = [name for name in ("tokens_per_s", "peak_gpu_gib") if mine.get(name) and other.get(name)]
    return {name: round(mine[name] / other[name], 4) for name in names}


def gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def versions() -> dict[str, str]:
    """Give the versions of what is measured, where it is installed."""
    found = {}
    for name in ("torch", "transformers", "speculators", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def said(words: list[str]) -> list[str]:
    """Give the command line without this machine's folder."""
    return ["WORK" if before == "--work" else word for before, word in zip(["", *words], words, strict=False)]


def table(result: dict[str, Any]) -> str:
    """Say it in Markdown."""
    shape, rows, machine = result["shape"], [], result["machine"]
    for name in ("hsdump", "speculators"):
        one = result.get(name, {})
        if "tokens_per_s" in one:
            rate, peak = f"{one['tokens_per_s']:,.0f}", f"{one['peak_gpu_gib']:.1f}"
            rows.append(f"| {name} | {one['attention']} | {rate} | {peak} | {one['wait_share']:.2%} | {one['steps']} |")
    ratio = result.get("ours_over_theirs", {})
    where = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    sizes = (
        f"Hidden size {shape['hidden']:,}, vocabulary {shape['vocab']:,}, {shape['draft']:,} draft tokens, samples of "
        f"{shape['length']:,}, {result['tokens_a_batch']:,} tokens a step, {result['ttt_steps']} steps of the "
        "training-time test."
    )
    head = ["| trainer | attention | tokens/s | peak GPU memory, GiB | waiting for data | steps |"]
    parts = [
        ["# Speed of the training"],
        [f"{machine['gpu'] or machine['processor']}, {machine['cpus']} CPU cores; {where}."],
        [f"`{result['command']}`"],
        [sizes],
        [*head, "|---|---|---|---|---|---|", *rows],
        [f"hsdump over speculators: {json.dumps(ratio)}"] if ratio else [],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def main() -> None:
    words = parse()
    shape = SMALL if words.small else BIG
    work = words.work / "hsdump-train-speed"
    shutil.rmtree(work, ignore_errors=True)
    begin.LOOKED_AT = 4  # states of random numbers: nothing to find
    begin_s = time.monotonic()
    samples = samples_for(words.steps)
    make_target(work / "target", shape)
    make_store(work / "store", work / "target", shape, samples)
    options = TrainOptions(
        ttt_steps=words.ttt_steps,
        tokens=A_BATCH * shape["length"],
        epochs=1000,
        max_steps=words.steps,
        held_out=HELD_OUT,
        validate_every=10**6,
        save_every=10**6,
        log_every=1,
        workers=0 if words.small else words.workers,
    )
    result: dict[str, Any] = {
        "shape": shape,
        "ttt_steps": words.ttt_steps,
        "tokens_a_batch": options.tokens,
        "samples": samples,
        "machine": {"cpus": len(os.sched_getaffinity(0)), "processor": platform.machine(), "gpu": gpu_name()},
        "versions": versions(),
        "command": "python -m benchmarks.train.speed OUT.json " + " ".join(said(sys.argv[2:])),
        "making_seconds": round(time.monotonic() - begin_s, 1),
    }
    result["hsdump"] = ours(work, options, words.attention, shape, words.out.with_suffix(".csv"))
    write(words.out, result)
    if words.speculators:
        try:
            result["speculators"] = theirs(work, options, words.their_seconds, words.their_loss)
        except Exception as error:
            traceback.print_exc()
            result["speculators"] = {"failed": f"{type(error).__name__}: {error}"[:1500]}
        result["ours_over_theirs"] = ratios(result["hsdump"], result["speculators"])
        write(words.out, result)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train.speed")
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp"), help="a folder is made there anew, of 25 GB")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--speculators", action="store_true")
    parser.add_argument("--their-seconds", type=float, default=200.0, help="that library's trainer is stopped then")
    parser.add_argument("--their-loss", choices=["fused", "eager"], default="", help="[default: fused, then eager]")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ttt-steps", type=int, default=7)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--attention", choices=["auto", "dense", "flex"], default="auto", help="auto: after a check")
    return parser.parse_args()


def write(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(table(result), encoding="utf-8")
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
