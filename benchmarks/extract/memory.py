"""What the client takes of memory for an input of a million samples, read through the real driver beside a store that
has nearly all of them: every key is known, the input is streamed to its end.

    python -m benchmarks.extract.memory --samples 1000000 --json memory.json

The engine answers at once with tiny states, because a real server would need hours; everything else is as in a run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hsdump.cli.watching import Watch, run_session
from hsdump.engines.base import CapturedSample, CaptureRequest, ServerLoad
from hsdump.extract.plan import ExtractOptions, make_plan
from hsdump.samples import TokenSample
from hsdump.schema import EngineInfo, StateShape
from hsdump.store import StoreWriter

SHAPE = StateShape(layers=(1,), hidden_size=4, dtype="bfloat16", final_state="post_norm")


class InstantEngine:
    """Gives states of zeros without a server."""

    lost = False

    def handshake(self) -> EngineInfo:
        return EngineInfo(
            engine="sglang",
            engine_version="none",
            attach="none",
            hsdump_version="none",
            model_path="/nowhere",
            model_class="None",
            num_layers=2,
            vocab_size=1 << 20,
            context_length=4096,
            shape=SHAPE,
            device="none",
        )

    async def capture(self, request: CaptureRequest) -> CapturedSample:
        states = tuple(np.zeros((len(request.input_ids), SHAPE.hidden_size), np.uint16) for _ in SHAPE.names)
        return CapturedSample(token_ids=request.input_ids, states=states)

    async def reconnect(self) -> EngineInfo:
        return self.handshake()

    async def load(self) -> ServerLoad | None:
        return None

    def request_id(self, request: CaptureRequest) -> str:
        return f"hsdump-{request.key}"

    async def abort(self, request_ids: Sequence[str]) -> None:  # noqa: ARG002 - the protocol's
        return None

    async def close(self) -> None:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--captured", type=int, default=5_000, help="of them, by the measured run")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, out = Path(folder) / "rows.jsonl", Path(folder) / "store"
        with rows.open("w") as file:
            for index in range(args.samples):
                file.write(json.dumps({"id": f"row-{index}", "input_ids": tokens(index)}) + "\n")
        options = ExtractOptions(inputs=(rows,), out=out, disk_reserve=0, concurrency=64)
        # In a process of its own, whose memory is not counted.
        child = multiprocessing.get_context("spawn").Process(target=fill, args=(options, args.samples - args.captured))
        child.start()
        child.join()
        assert child.exitcode == 0
        before = rss_bytes()
        started_s = time.monotonic()
        state = asyncio.run(run_session({"instant": InstantEngine()}, options, Watch(quiet=True)))
        assert state.exit_code() == 0, state.report()
        found = {
            "machine": {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
            "input_samples": args.samples,
            "already_committed": state.already,
            "captured": state.committed,
            "seconds": round(time.monotonic() - started_s, 1),
            "rss_before_bytes": before,
            "peak_rss_bytes": rss_bytes(),
            "torch_in_process": "torch" in sys.modules,
        }
    print(json.dumps(found))
    args.json.write_text(json.dumps(found, indent=1) + "\n")


def tokens(index: int) -> list[int]:
    return [index & 0x3FF, index >> 10, 5, 6, 7, 8, 9, 10]


def rss_bytes() -> int:
    """Give the most that this process ever had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fill(options: ExtractOptions, count: int) -> None:
    """Commit the first samples of the input, as earlier runs would have."""
    manifest = make_plan(options, InstantEngine().handshake()).manifest
    states = [np.zeros((8, SHAPE.hidden_size), np.uint16) for _ in SHAPE.names]
    with StoreWriter.open(options.out, manifest) as writer:
        for index in range(count):
            ids = np.asarray(tokens(index), np.int64)
            writer.add(TokenSample.make(f"row-{index}", ids, np.ones(8, np.uint8)), states)
            if index % 20_000 == 0:
                writer.commit()
        writer.commit()


if __name__ == "__main__":
    main()
