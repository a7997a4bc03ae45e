"""Right bytes on the GPU: a tiny model's captured states against transformers, with copies made late on purpose.

    python -m benchmarks.gpu.check --device cuda --model TINY_MODEL --out OUT

The side stream sleeps before every copy (HSDUMP_TEST_DELAY_CYCLES), so that the next forward pass has long overwritten
the buffers of a CUDA graph when the copy runs: wrong synchronization shows as garbage (relative error 0.5 and more).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from benchmarks.serving.load import captured
from benchmarks.serving.servers import Target, server

from hsdump.arrays import to_float32
from hsdump.layers import eagle3_layers
from hsdump.samples import sample_key


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", type=Path, required=True, help="folder with weights, vocabulary of 2048")
    parser.add_argument("--sglang-python", default=sys.executable)
    parser.add_argument("--pythonpath", default=os.environ.get("PYTHONPATH", ""))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rng = np.random.default_rng(3)
    shared = rng.integers(10, 2000, 300)
    samples = [np.concatenate([shared, rng.integers(10, 2000, n)]) for n in (5, 60, 400, 900, 1500, 2500, 3300) * 4]
    target = Target(device=args.device, python=args.sglang_python, pythonpath=args.pythonpath, log_dir=args.out)
    flags = ["--load-format", "auto", "--chunked-prefill-size", "2048"]
    if args.device == "cuda":
        flags += ["--cuda-graph-max-bs-decode", "8", "--mem-fraction-static", "0.3"]
    results = {}
    for name, cycles in (("prompt", "0"), ("delayed", "200000000")):
        env = {"HSDUMP_TEST_DELAY_CYCLES": cycles}
        serve = ["--hand-over", "ring", "--spool-bytes", str(1 << 29)]
        kept: dict[str, list[np.ndarray]] = {}
        with server(target, f"check-{name}", args.model, flags, serve=serve, env=env) as url:
            captured(url, samples, keep=kept)
        results[name] = compare(args, samples, kept)
        print(name, json.dumps(results[name]), flush=True)
    (args.out / "gpu-check.json").write_text(json.dumps(results, indent=1))


def compare(args: argparse.Namespace, samples: list[np.ndarray], kept: dict[str, list[np.ndarray]]) -> dict[str, float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(args.device).eval()
    layers = eagle3_layers(model.config.num_hidden_layers)
    errors = []
    for ids in samples:
        with torch.no_grad():
            out = model(torch.tensor(ids, device=args.device)[None], output_hidden_states=True, use_cache=False)
        found = kept[sample_key(ids, np.ones(len(ids), dtype=np.uint8))]
        for state, layer in zip(found, (*layers, -1), strict=True):
            expected = out.hidden_states[layer][0].float().cpu().numpy()
            error = np.linalg.norm(to_float32(state, "bfloat16") - expected) / np.linalg.norm(expected)
            errors.append(float(error))
    return {"states": len(errors), "worst": round(max(errors), 5), "mean": round(float(np.mean(errors)), 5)}


if __name__ == "__main__":
    main()
