"""What of a server's time is lost beside a disk that stands still now and then, and to a run's start and end.

    sudo python -m benchmarks.extract.stalls --json benchmarks/results/stalls.json

The disk is a file system in memory that is really frozen (FIFREEZE): every write, rename and fsync on it waits until it
is thawed. The server takes one request after the other at a set pace, and notes how long it had none; all else is the
real client with its real store. It needs a machine where one may mount.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import multiprocessing
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.extract.stand_in import StandIn, info_of

from hsdump.cli.watching import Watch, run_session
from hsdump.engines.base import CapturedSample, CaptureRequest
from hsdump.extract.plan import ExtractOptions
from hsdump.lean import be_lean
from hsdump.schema import StateShape

SHAPE = StateShape(layers=(2, 14, 25), hidden_size=768, dtype="bfloat16", final_state="post_norm")
"""The story's (benchmarks/story)."""

VOCAB = 8192
ROW_TOKENS = 200
IN_FLIGHT = 16
SPOOL_BYTES = 8 << 30
"""`hsdump serve`'s default."""

FREEZE, THAW = 0xC0045877, 0xC0045878
"""FIFREEZE and FITHAW of <linux/fs.h>."""


@dataclass(frozen=True, slots=True)
class Stall:
    name: str
    every_s: float = 0.0
    for_s: float = 0.0


STALLS = (Stall("never"), Stall("0.8 s of 4", 4.0, 0.8), Stall("2 s of 8", 8.0, 2.0))


class PacedServer(StandIn):
    """One request after the other; what is noted is when it had none, and when it had answered the last one."""

    def __init__(self, tokens_per_s: float) -> None:
        super().__init__(info_of(SHAPE, vocab_size=VOCAB, spool_max_bytes=SPOOL_BYTES))
        self.tokens_per_s = tokens_per_s
        self.idle_s = 0.0
        self.longest_idle_s = 0.0
        self.first_s: float | None = None
        self.done_s = 0.0
        block = np.random.default_rng(1).integers(0, 1 << 14, (ROW_TOKENS, SHAPE.hidden_size), np.uint16)
        self._states = tuple(block for _ in SHAPE.names)

    async def capture(self, request: CaptureRequest) -> CapturedSample:
        now_s = time.monotonic()
        if self.first_s is None:
            self.first_s = self.done_s = now_s
        idle_s = max(0.0, now_s - self.done_s)
        self.idle_s += idle_s
        self.longest_idle_s = max(self.longest_idle_s, idle_s)
        self.done_s = max(now_s, self.done_s) + len(request.input_ids) / self.tokens_per_s
        await asyncio.sleep(self.done_s - now_s)
        return CapturedSample(token_ids=request.input_ids, states=self._states, in_spool=True)


@contextlib.contextmanager
def memory_disk(num_bytes: int) -> Iterator[Path]:
    """Mount an empty ext4 in memory, for as long as this lasts."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, tempfile.TemporaryDirectory() as mount:
        image = Path(folder) / "disk"
        with image.open("wb") as file:
            file.truncate(num_bytes)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, mount], check=True)
        try:
            yield Path(mount)
        finally:
            subprocess.run(["umount", mount], check=True)


@contextlib.contextmanager
def standing_still(disk: Path, stall: Stall) -> Iterator[None]:
    """Freeze a file system again and again; it is thawed when this ends, also by an error."""
    if not stall.for_s:
        yield
        return
    process = multiprocessing.get_context("fork").Process(target=freeze_again_and_again, args=(disk, stall))
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()
        with contextlib.suppress(OSError):  # it was not frozen just then
            on_disk(disk, THAW)


def freeze_again_and_again(disk: Path, stall: Stall) -> None:
    while True:
        time.sleep(stall.every_s - stall.for_s)
        on_disk(disk, FREEZE)
        time.sleep(stall.for_s)
        on_disk(disk, THAW)


def on_disk(disk: Path, what: int) -> None:
    fd = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, what, 0)
    finally:
        os.close(fd)


def measure(disk: Path, stall: Stall, rows: Path, tokens_per_s: float) -> dict[str, Any]:
    """Fill one store, which is not kept."""
    server, options = PacedServer(tokens_per_s), options_of(disk / "store", rows)
    begin_s = time.monotonic()
    with standing_still(disk, stall):
        state = asyncio.run(run_session({"paced": server}, options, Watch(quiet=True)))
        seconds = time.monotonic() - begin_s
    assert state.exit_code() == 0, state.report()
    assert server.first_s is not None
    subprocess.run(["rm", "-rf", disk / "store"], check=True)
    served_s = server.done_s - server.first_s
    return {
        "disk_stands_still": stall.name,
        "samples": state.committed,
        "tokens": state.tokens,
        "seconds": round(seconds, 3),
        "of_the_pace": round(state.tokens / tokens_per_s / seconds, 4),
        "before_the_first_request_s": round(server.first_s - begin_s, 3),
        "idle_share": round(server.idle_s / served_s, 4),
        "longest_idle_s": round(server.longest_idle_s, 3),
        "behind_the_last_answer_s": round(seconds - (server.done_s - begin_s), 3),
    }


def options_of(out: Path, rows: Path) -> ExtractOptions:
    return ExtractOptions(inputs=(rows,), out=out, disk_reserve=0, concurrency=IN_FLIGHT)


def write_rows(path: Path, count: int) -> Path:
    rng = np.random.default_rng(2)
    with path.open("w") as file:
        for number in range(count):
            ids = rng.integers(3, VOCAB, ROW_TOKENS).tolist()
            file.write(json.dumps({"id": f"row-{number}", "input_ids": ids, "loss_mask": [1] * ROW_TOKENS}) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens-per-s", type=float, default=32_000, help="the server's pace")
    parser.add_argument("--seconds", type=float, default=20, help="of one run, at that pace")
    parser.add_argument("--readings", type=int, default=3)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    be_lean(True)  # as `hsdump extract` is
    count = int(args.seconds * args.tokens_per_s / ROW_TOKENS)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        rows = write_rows(Path(folder) / "rows.jsonl", count)
        with memory_disk(2 * count * ROW_TOKENS * SHAPE.bytes_per_token + (1 << 30)) as disk:
            measure(disk, STALLS[0], write_rows(Path(folder) / "few.jsonl", IN_FLIGHT), args.tokens_per_s)  # imports
            for _ in range(args.readings):
                for stall in STALLS:
                    found.append(measure(disk, stall, rows, args.tokens_per_s))
                    print(json.dumps(found[-1]), flush=True)
    about = {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}
    command = f"python -m benchmarks.extract.stalls --tokens-per-s {args.tokens_per_s:g} --seconds {args.seconds:g}"
    facts = {"machine": about, "command": command, "row_tokens": ROW_TOKENS, "in_flight": IN_FLIGHT}
    args.json.write_text(
        json.dumps({**facts, "bytes_per_token": SHAPE.bytes_per_token, "rows": found}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
