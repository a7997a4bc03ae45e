"""Right bytes on the GPU: tiny models' captured states against transformers, with copies made late on purpose.

    python -m benchmarks.gpu.check --device cuda --out OUT

The side stream sleeps before every copy (HSDUMP_TEST_DELAY_CYCLES), so that the next forward pass has long overwritten
the buffers of a CUDA graph when the copy runs: wrong synchronization shows as garbage (relative error 0.5 and more).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.serving.load import captured
from benchmarks.serving.servers import Target, server

from hsdump.arrays import to_float32
from hsdump.demo import tiny_model
from hsdump.demo.tiny_model import Architecture, make_tiny_model
from hsdump.layers import eagle3_layers
from hsdump.samples import sample_key

ROW_LIMIT = 0.03
"""Three times what bfloat16 leaves between two engines (0.0066 to 0.0078 a state). A mixture of experts has rows beyond
it: where two experts are nearly tied, another order of additions picks the other one."""

Kept = dict[str, list[np.ndarray]]

FLAGS: dict[str, dict[Architecture, tuple[str, ...]]] = {
    "cuda": {"llama": (), "dsv3": ("--moe-runner-backend", "triton")},
    "cpu": {"llama": ()},
}
"""By device. DeepSeek's attention needs a patched SGLang on a CPU: tests/server/test_capture.py has it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--work", type=Path, default=Path("/tmp/hsdump-check"))
    parser.add_argument("--sglang-python", default=sys.executable)
    parser.add_argument("--pythonpath", default=os.environ.get("PYTHONPATH", ""))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    shared = rng.integers(10, 2000, 300)
    samples = [np.concatenate([shared, rng.integers(10, 2000, n)]) for n in (5, 60, 400, 900, 1500, 2500, 3300) * 4]
    all_flags = FLAGS[args.device]
    models = {name: make_tiny_model(args.work / name, name) for name in all_flags}
    if "dsv3" in models:
        widen_attention(models["dsv3"])
    target = Target(device=args.device, python=args.sglang_python, pythonpath=args.pythonpath, log_dir=args.out)
    cases = [(name, when, cycles) for name in all_flags for when, cycles in (("prompt", "0"), ("delayed", "200000000"))]

    def run(case: tuple[Architecture, str, str]) -> Kept | Exception:
        name, when, cycles = case
        flags = ["--load-format", "auto", "--chunked-prefill-size", "2048", "--max-total-tokens", "40000"]
        if args.device == "cuda":
            flags += ["--cuda-graph-max-bs-decode", "8", *all_flags[name]]
        serve = ["--hand-over", "ring", "--spool-bytes", str(1 << 29)]
        env, kept = {"HSDUMP_TEST_DELAY_CYCLES": cycles}, Kept()
        try:
            with server(target, f"check-{name}-{when}", models[name], flags, serve=serve, env=env) as url:
                captured(url, samples, keep=kept)
        except Exception as error:  # the other cases go on
            return error
        return kept

    with ThreadPoolExecutor(len(cases) if args.device == "cuda" else 1) as pool:
        found = list(pool.map(run, cases))
    results: dict[str, dict[str, Any]] = {}
    for (name, when, _), kept in zip(cases, found, strict=True):
        one = {"error": str(kept)[:3000]} if isinstance(kept, Exception) else compare(args, models[name], samples, kept)
        results.setdefault(name, {})[when] = one
        print(name, when, json.dumps(one), flush=True)
    (args.out / "gpu-check.json").write_text(json.dumps(results, indent=1) + "\n")


def widen_attention(folder: Path) -> None:
    """Make the tiny DeepSeek again with the published models' head sizes: Triton's kernels for GPUs take few others."""
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    config = AutoConfig.from_pretrained(folder)
    config.update({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128})
    config.qk_head_dim, config.head_dim = 192, 64
    set_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    tiny_model._make_routing_decisive(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    tiny_model._add_to_config(folder / "config.json", tiny_model._DSV3_KEYS_FOR_SGLANG)


def compare(args: argparse.Namespace, folder: Path, samples: list[np.ndarray], kept: Kept) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(args.device).eval()
    layers = eagle3_layers(model.config.num_hidden_layers)
    errors, row_errors = [], []
    for ids in samples:
        with torch.no_grad():
            out = model(torch.tensor(ids, device=args.device)[None], output_hidden_states=True, use_cache=False)
        found = kept[sample_key(ids, np.ones(len(ids), dtype=np.uint8))]
        for state, layer in zip(found, (*layers, -1), strict=True):
            expected = out.hidden_states[layer][0].float().cpu().numpy()
            off = to_float32(state, "bfloat16") - expected
            errors.append(float(np.linalg.norm(off) / np.linalg.norm(expected)))
            row_errors.append(np.linalg.norm(off, axis=1) / np.linalg.norm(expected, axis=1))
    rows = np.concatenate(row_errors)
    return {
        "states": len(errors),
        "worst": round(max(errors), 5),
        "mean": round(float(np.mean(errors)), 5),
        "rows": len(rows),
        "median_row": round(float(np.median(rows)), 5),
        "rows_within_0.03": round(float((rows < ROW_LIMIT).mean()), 5),
    }


if __name__ == "__main__":
    main()
