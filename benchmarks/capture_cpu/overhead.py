"""What capture costs on a CPU machine, side by side in one run.

    .venv/bin/python -m benchmarks.capture_cpu.overhead --sglang-python .venv-sglang/bin/python --model MODEL

Modes, all on the real SGLang with the same token ids, prefill only, 8 requests in flight:

- `plain`      a server without hsdump in its environment
- `ordinary`   ordinary requests on a server that has capture on
- `shm`        hsdump's requests on that same server, taken from shared memory and dropped
- `json`       SGLang's own way out (`--enable-return-aux-hidden-states`), without the final state

`ordinary` and `shm` alternate on one server, so their ratio is free of drift between servers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.serving.load import Measured, Samples, captured, make_samples, ordinary
from benchmarks.serving.servers import Target, server

IN_FLIGHT = 8
JSON_FLAGS = [
    "--enable-return-hidden-states",
    "--enable-return-aux-hidden-states",
    *("--speculative-algorithm", "EAGLE3"),
]


def main() -> None:
    args = parse_args()
    samples = make_samples(args.samples, args.length, args.vocab, seed=0)
    few = samples[: args.json_samples]
    rates: dict[str, list[float]] = {"plain": [], "ordinary": [], "shm": [], "json": []}
    target = Target(device="cpu", python=args.sglang_python, log_dir=args.log_dir)
    model, flags = Path(args.model), ["--load-format", "auto", "--chunked-prefill-size", str(args.chunk)]
    with server(target, "plain", model, flags) as url:
        warm_up(url, samples)
        rates["plain"] = [plain(url, samples).tokens_per_s for _ in range(args.rounds)]
    with server(target, "capture", model, flags, serve=[]) as url:
        warm_up(url, samples)
        for _ in range(args.rounds):
            rates["ordinary"].append(plain(url, samples).tokens_per_s)
            rates["shm"].append(captured(url, samples, at_once=IN_FLIGHT).tokens_per_s)
    json_bytes = 0
    with server(target, "json", model, [*flags, *JSON_FLAGS]) as url:
        warm_up(url, samples)
        for _ in range(args.rounds):
            measured = plain(url, few, hidden=True)
            json_bytes = measured.num_bytes
            rates["json"].append(measured.tokens_per_s)
    write_results(args, rates, json_bytes / sum(map(len, few)))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang-python", required=True, help="interpreter of the environment with the real SGLang")
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--length", type=int, default=512, help="tokens a sample")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--json-samples", type=int, default=8, help="samples of the JSON mode, which is slow")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=8192, help="--chunked-prefill-size of all servers")
    parser.add_argument("--log-dir", type=Path, default=Path(tempfile.gettempdir()), help="for the servers' output")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args()


def plain(url: str, samples: Samples, *, hidden: bool = False) -> Measured:
    return ordinary(url, samples, at_once=IN_FLIGHT, hidden=hidden)


def warm_up(url: str, samples: Samples) -> None:
    plain(url, samples[:IN_FLIGHT])


def write_results(args: argparse.Namespace, rates: dict[str, list[float]], json_bytes_per_token: float) -> None:
    median = {mode: statistics.median(values) for mode, values in rates.items()}
    pairs = [shm / ordinary for shm, ordinary in zip(rates["shm"], rates["ordinary"], strict=True)]
    config = json.loads((Path(args.model) / "config.json").read_text())
    raw = 4 * config["hidden_size"] * 2
    result = {
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "versions": {"sglang": sglang_version(args.sglang_python), "hsdump": hsdump_version()},
        "command": f"python -m benchmarks.capture_cpu.overhead --length {args.length} --samples {args.samples} "
        f"--rounds {args.rounds} --chunk {args.chunk}",
        "model": {key: config[key] for key in ("architectures", "hidden_size", "num_hidden_layers")},
        "rows": [
            {
                "mode": mode,
                "tokens_per_s": round(median[mode], 1),
                "all_rounds": [round(rate, 1) for rate in values],
                "ratio_to_plain": round(median[mode] / median["plain"], 4),
            }
            for mode, values in rates.items()
        ],
        "shm_over_ordinary_pairwise": {"median": round(statistics.median(pairs), 4), "min": round(min(pairs), 4)},
        "shm_over_json": round(median["shm"] / median["json"], 1),
        "http_bytes_per_token_json": round(json_bytes_per_token),
        "raw_bytes_per_token_with_final_state": raw,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "capture-cpu.json").write_text(json.dumps(result, indent=2) + "\n")
    lines = ["# Capture on a CPU machine", "", f"`{result['command']}`", ""]
    lines += ["| mode | prefill tokens/s (median) | ratio to plain |", "|---|---|---|"]
    lines += [f"| {r['mode']} | {r['tokens_per_s']} | {r['ratio_to_plain']} |" for r in result["rows"]]
    lines += ["", f"`shm` over `ordinary`, pair by pair on one server: {result['shm_over_ordinary_pairwise']}", ""]
    lines += [
        f"JSON over HTTP: {result['http_bytes_per_token_json']} bytes a token for three layers; raw with the final"
    ]
    lines += [f"state: {raw}. `shm` is {result['shm_over_json']} times as fast as `json`.", ""]
    (args.out / "capture-cpu.md").write_text("\n".join(lines))
    sys.stdout.write("\n".join(lines))


def sglang_version(python: str) -> str:
    code = "from importlib.metadata import version; print(version('sglang'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def hsdump_version() -> str:
    from hsdump import __version__

    return __version__


if __name__ == "__main__":
    main()
