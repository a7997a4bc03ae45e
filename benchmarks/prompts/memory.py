"""`hsdump prepare` over a million conversations, to its end: how much memory its processes take on the way.

    python -m benchmarks.prompts.memory --model MODEL --conversations 1000000 --workers 2 --json memory.json

Every conversation is another one, so none is a duplicate, and the keys that are remembered grow to the largest.
The memory of the command and of its workers (resident, /proc) is read twice a second, and kept beside the rows done.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.prompts.prepare_speed import WORDS

POLL_S = 0.5
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def conversations(count: int, seed: int = 11) -> Iterator[str]:
    """Give rows of one or two exchanges, messages of 5 to 25 words, one JSON line a row."""
    draw = random.Random(seed)
    for number in range(count):
        messages = []
        for _ in range(draw.choice((1, 1, 1, 2))):
            messages += [
                {"role": "user", "content": f"{number} " + " ".join(draw.choices(WORDS, k=draw.randint(5, 15)))},
                {"role": "assistant", "content": " ".join(draw.choices(WORDS, k=draw.randint(5, 25)))},
            ]
        yield json.dumps({"messages": messages}, ensure_ascii=False) + "\n"


def resident_mib(pid: int) -> float:
    """Read a process's resident memory; 0 when it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / (1 << 20)
    except (OSError, IndexError):
        return 0.0


def children(pid: int) -> list[int]:
    """Name a process's children, those of its threads too."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in path.read_text().split()]
        except OSError:
            continue
    return found


def watch(process: subprocess.Popen[bytes], out: Path) -> list[dict[str, float]]:
    """Read the memory until the process ends; `written_mib` is the output's part that is there already."""
    start, seen = time.monotonic(), []
    while process.poll() is None:
        workers = [resident_mib(pid) for pid in children(process.pid)]
        written = sum(path.stat().st_size for path in out.parent.glob(f"{out.stem}*") if path.is_file())
        seen.append(
            {
                "s": round(time.monotonic() - start, 1),
                "command_mib": round(resident_mib(process.pid), 1),
                "largest_worker_mib": round(max(workers, default=0.0), 1),
                "written_mib": round(written / (1 << 20), 1),
            }
        )
        time.sleep(POLL_S)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--conversations", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, out = Path(folder) / "rows.jsonl", Path(folder) / "samples.parquet"
        with rows.open("w", encoding="utf-8") as file:
            file.writelines(conversations(args.conversations))
        command = ["prepare", str(rows), "--model", args.model, "--out", str(out), "--workers", str(args.workers)]
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "hsdump.cli.main", *command, "--json"], stdout=subprocess.PIPE
        )
        seen = watch(process, out)
        seconds = time.monotonic() - start
        text, _ = process.communicate()
        report = json.loads(text)
    peak = {name: max(entry[name] for entry in seen) for name in ("command_mib", "largest_worker_mib")}
    result = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "command": f"python -m benchmarks.prompts.memory --conversations {args.conversations} --workers {args.workers}",
        "exit_code": process.returncode,
        "report": {name: report[name] for name in ("rows", "samples", "tokens") if name in report},
        "seconds": round(seconds, 1),
        "conversations_per_s": round(args.conversations / seconds, 1),
        "peak": peak,
        "over_time": seen[:: max(1, len(seen) // 40)],
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: result[name] for name in result if name != "over_time"}, indent=1))


if __name__ == "__main__":
    main()
