"""Turn `store.json` into `store.md`.

python benchmarks/store/table.py benchmarks/results
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(folder: Path) -> None:
    data = json.loads((folder / "store.json").read_text())
    machine = f"{data['machine']['cpus']} cores, Python {data['machine']['python']}"
    lines = [
        "# The store, against what the machine can do",
        "",
        f"`python benchmarks/store/measure.py`, {machine}.",
        "Each pair was measured alternately, many times; the ratio is the median of the ratios. The machine's disk and",
        "cores were shared with other work, so the spread is wide, and the ratio is what counts.",
        "",
        "| | store | limit | ratio | least, most |",
        "|---|---|---|---|---|",
    ]
    titles = {
        "commit": "raw commit / write + fsync",
        "commit_without_disk": "the same into memory: no disk to wait for",
        "read": "read from page cache / memcpy",
    }
    for name, title in titles.items():
        row = data[name]
        least, most = row["ratio_min_max"]
        rates = f"{row['store_GB_per_s']} GB/s | {row['limit_GB_per_s']} GB/s"
        lines.append(f"| {title} | {rates} | {row['ratio']} | {least}, {most} |")
    lines += _codecs(data["codecs"]) if "codecs" in data else []
    lines += _many(data["many"]) if "many" in data else []
    (folder / "store.md").write_text("\n".join(lines) + "\n")


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
