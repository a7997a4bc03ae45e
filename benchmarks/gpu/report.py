"""Tables and a picture of the GPU results.

    python benchmarks/gpu/report.py benchmarks/results

Reads `gpu-capture-<run>.json` and `gpu-check.json` there; writes `gpu-capture.md`, `gpu-capture.json` (one row for each
shape, request length and mode) and, with matplotlib, `gpu-capture.svg`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

RUNS = {
    "l8b": "Llama-3.1-8B shape",
    "l8b-alone": "Llama-3.1-8B shape, an earlier call, alone on its machine",
    "kimi": "Kimi shape (hidden 7168, 6 layers)",
    "kimi-store": "Kimi shape, a later call: the store written several shards at a time",
    "kimi-wide": "Kimi shape, an earlier call: two sizes of staging memory",
}

Row = dict[str, Any]


def merged(results: dict[str, Any]) -> list[Row]:
    """One row for each mode and length: means over the rounds, ratios of the rounds side by side."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in results["rows"]:
        groups.setdefault((row["mode"], row["length"]), []).append(row)
    found = []
    for (_mode, length), rows in groups.items():
        one = {**rows[0], "tokens_per_s": round(mean(row["tokens_per_s"] for row in rows), 1)}
        base = groups.get(("none", length))
        if base:
            one["ratio_to_no_capture"] = round(one["tokens_per_s"] / mean(row["tokens_per_s"] for row in base), 4)
            one["ratios"] = [row["ratio_to_no_capture"] for row in rows]
        if base and "drained_s" in one:
            one["drained_s"] = max(row["drained_s"] for row in rows)
            one["ratios_to_last_response"] = [
                round(seconds(plain) / (seconds(row) - row["drained_s"]), 4)
                for plain, row in zip(base, rows, strict=True)
            ]
        one["gb_per_s"] = round(mean(row["gb_per_s"] for row in rows), 3)
        found.append(one)
    return found


def seconds(row: Row) -> float:
    return float(row["tokens"] / row["tokens_per_s"])


def table(run: str, results: dict[str, Any]) -> list[str]:
    machine, versions = results["machine"], results["versions"]
    lines = [f"## {RUNS[run]}", ""]
    lines += [f"{machine['gpu']}, {machine['cpus']} CPU cores; SGLang {versions['sglang']}, torch {versions['torch']}."]
    lines += ["", f"`{results['command']}`", ""]
    lines += [
        "| mode | tokens a request | tokens/s | of no capture, each round | up to the last response | GB/s | drained |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in merged(results):
        drained = f"{row['drained_s'] * 1e3:.1f} ms" if "drained_s" in row else ""
        ratios = ", ".join(f"{ratio:.3f}" for ratio in row.get("ratios", [])) or row["ratio_to_no_capture"] or ""
        last = ", ".join(f"{ratio:.3f}" for ratio in row.get("ratios_to_last_response", []))
        cells = [row["mode"], row["length"], f"{row['tokens_per_s']:,.0f}", ratios, last, row["gb_per_s"], drained]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for shape, counters in results.get("counters", {}).items():
        lines += [
            "",
            f"Scheduler CPU a captured batch: {counters['busy_us_per_batch']} us; refused: {counters['refused']}.",
        ]
        lines += [f"Disk alone, GB/s by writers: {results.get('disk_gb_per_s', {}).get(shape)}."]
    for key in ("gpu_memory", "against_naive", "verify", "errors"):
        if results.get(key):
            lines += ["", f"{key}: `{json.dumps(results[key])}`"]
    for found in results.get("decode", {}).values():
        lines += ["", "| ordinary decoding beside | p50 ms | p95 ms | p99 ms | mean ms | answer p50 s | tokens |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for name, one in found.items():
            cells = [one[key] for key in ("p50_ms", "p95_ms", "p99_ms", "mean_ms", "answer_p50_s", "tokens")]
            lines.append("| " + " | ".join(map(str, [name, *cells])) + " |")
    for note in results.get("notes", []):
        lines += ["", f"Note: {note}"]
    return [*lines, ""]


def check_lines(check: dict[str, Any]) -> list[str]:
    lines = ["## Against transformers on the same GPU", ""]
    lines += [
        "`python -m benchmarks.gpu.check --device cuda --out OUT`: 28 requests of 305 to 3,600 tokens with a shared"
    ]
    lines += [
        "prefix, chunks of 2,048, default prefill CUDA graphs. `delayed`: every copy comes 0.1 s late on purpose.",
        "",
    ]
    lines += ["| model | copies | states | worst relative error | mean | median row | rows within 0.03 |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, cases in check.items():
        for when, one in cases.items():
            cells = [one.get(key) for key in ("states", "worst", "mean", "median_row", "rows_within_0.03")]
            lines.append("| " + " | ".join(map(str, [name, when, *cells])) + " |")
    return lines


def picture(folder: Path, found: dict[str, dict[str, Any]]) -> None:
    """Bars of the ratio to no capture, a line of GB/s, at 2,048 tokens a request."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(5.2 * len(found), 3.6), squeeze=False)
    for axis, (name, results) in zip(axes[0], found.items(), strict=True):
        rows = {row["mode"]: row for row in merged(results) if row["length"] == 2048}
        modes = [mode for mode in ("none", "aux", "shm", "store-raw", "naive", "json") if mode in rows]
        axis.bar(modes, [rows[mode]["ratio_to_no_capture"] for mode in modes], color="#4477aa")
        axis.set_ylim(0, 1.1)
        axis.set_ylabel("prefill rate, no capture = 1")
        axis.set_title(RUNS[name], fontsize=10)
        rate = axis.twinx()
        copied = [mode for mode in modes if mode not in ("none", "aux")]
        rate.plot(copied, [rows[mode]["gb_per_s"] for mode in copied], "o-", color="#cc6677")
        rate.set_ylim(bottom=0)
        rate.set_ylabel("GB/s of states", color="#cc6677")
    figure.tight_layout()
    figure.savefig(folder / "gpu-capture.svg")


def main() -> None:
    folder = Path(sys.argv[1])
    found = {run: json.loads((folder / f"gpu-capture-{run}.json").read_text()) for run in RUNS}
    lines = ["# Capture on one H200", ""]
    for run, results in found.items():
        lines += table(run, results)
    lines += check_lines(json.loads((folder / "gpu-check.json").read_text()))
    (folder / "gpu-capture.md").write_text("\n".join(lines) + "\n")
    main_runs = {run: found[run] for run in ("l8b", "kimi")}
    whole = {
        "machine": found["kimi"]["machine"],
        "versions": found["kimi"]["versions"],
        "command": [results["command"] for results in main_runs.values()],
        "rows": [row for results in main_runs.values() for row in merged(results)],
    }
    (folder / "gpu-capture.json").write_text(json.dumps(whole, indent=1) + "\n")
    try:
        picture(folder, main_runs)
    except ModuleNotFoundError:
        print("no picture: pip install matplotlib")


if __name__ == "__main__":
    main()
