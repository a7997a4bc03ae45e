"""Turn `store.json` into `store.md`.

python benchmarks/store/table.py benchmarks/results
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    data = json.loads((folder / "store.json").read_text())
    host = f"{data['machine']['cpus']} cores, Python {data['machine']['python']}"
    lines = [
        "# The store, against what the machine can do",
        "",
        f"`python benchmarks/store/measure.py`, {host}.",
        "Each pair was measured alternately, many times; the ratio is the median of the ratios. The machine's disk and",
        "cores were shared with other work, so the spread is wide, and the ratio is what counts.",
        "",
        "| | store | limit | ratio | least, most |",
        "|---|---|---|---|---|",
    ]
    titles = {
        "commit": "raw commit / write + fsync",
        "commit_without_disk": "the same into memory: no disk to wait for",
        "commit_without_disk_with_checksums": "into memory / write and xxh3-128 of the same bytes",
        "read": "read from page cache / memcpy",
    }
    for name, title in titles.items():
        row = data[name]
        least, most = row["ratio_min_max"]
        rates = f"{row['store_GB_per_s']} GB/s | {row['limit_GB_per_s']} GB/s"
        lines.append(f"| {title} | {rates} | {row['ratio']} | {least}, {most} |")
    lines += _pipeline(data["pipeline"]) if "pipeline" in data else []
    lines += _filling(data["filling"]) if "filling" in data else []
    lines += _codecs(data["codecs"]) if "codecs" in data else []
    lines += _many(data["many"]) if "many" in data else []
    if machine := data.get("state_machine"):
        lines += ["", f"State machine, by hand: {machine['cases']} cases, {machine['divergences']} divergences, at"]
        lines += [f"{machine['revision']} (`{machine['command']}`)."]
    lines += ["", *(f"Note: {note}." for note in data.get("notes", []))]
    (folder / "store.md").write_text("\n".join(lines) + "\n")


def _pipeline(pipeline: dict[str, dict[str, float]]) -> list[str]:
    lines = [
        "",
        "Into memory, what is short of 1 is the price of the checksums: every byte is read once more, which a disk",
        "hides that is slower than xxh3-128, as long as a core is free for it. Hashing between writes of cached",
        "blocks, or in a thread beside the write, was tried and gained nothing.",
        "",
        f"A source with a pace of its own (12 samples of {pipeline['source_1x_disk']['sample_MB']} MB, two a shard),",
        "against write + fsync measured just before; committed in the thread that adds them",
        "(`commit`), or in a second one while the next shard fills (`begin_commit`); one shard at a time:",
        "",
        "| source | `commit`, of write + fsync | `begin_commit`, of write + fsync | gain |",
        "|---|---|---|---|",
    ]
    for name, row in pipeline.items():
        rate = f"{name.split('_')[1]} the disk, {row['source_GB_per_s']} GB/s"
        lines.append(f"| {rate} | {row['commit_of_disk']} | {row['begin_commit_of_disk']} | {row['gain']} |")
    return lines


def _filling(filling: dict[str, Any]) -> list[str]:
    lines = [
        "",
        f"{filling['bytes'] / 1e9:.1f} GB in samples of {filling['sample_MB']} MB, as fast as they can be brought; all",
        "ways alternate. `hsdump extract` uses `begin_add`, everything else `add`. Processor time is of",
        "this process, without the kernel's threads that write back:",
        "",
        "| way | GB/s | least, most | processor seconds a GB | files |",
        "|---|---|---|---|---|",
    ]
    for name, rate in filling["GB_per_s"].items():
        least, most = filling["GB_per_s_min_max"][name]
        cpu_s = filling.get("cpu_s_a_GB", {}).get(name, "-")
        lines.append(f"| {name} | {rate} | {least}, {most} | {cpu_s} | {filling['files'][name]} |")
    return lines


def _codecs(codecs: dict[str, object]) -> list[str]:
    lines = [
        "",
        f"Codecs on {codecs['tokens']} tokens of English text through a real model (SmolLM2-135M-Instruct, 4-bit",
        "weights, computed in bfloat16), CPU time of one core:",
        "",
        "| codec | size | encode MB/s | decode MB/s | relative error by state |",
        "|---|---|---|---|---|",
    ]
    for name in ("raw", "blosc2", "fp8"):
        row = codecs[name]
        assert isinstance(row, dict)
        errors = ", ".join(f"{state} {error}" for state, error in row.get("relative_error", {}).items()) or "0"
        encode, decode = (row[f"{what}_MB_per_s_core"] or "-" for what in ("encode", "decode"))
        lines.append(f"| {name} | {row['size']} | {encode} | {decode} | {errors} |")
    return lines


def _many(many: dict[str, object]) -> list[str]:
    lines = ["", f"{many['samples']} samples of 4 tokens, {many['bytes']} bytes:", "", "| | seconds | peak memory MB |"]
    lines.append("|---|---|---|")
    for name, row in many.items():
        if isinstance(row, dict):
            lines.append(f"| {name} | {row['seconds']} | {row['peak_rss_MB']} |")
    return lines


if __name__ == "__main__":
    main(Path(sys.argv[1]))
