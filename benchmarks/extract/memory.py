"""What the client takes of memory for an input of a million samples, read through the real driver beside a store that
has nearly all of them: every key is known, the input is streamed to its end.

    python -m benchmarks.extract.memory --samples 1000000 --folder FOLDER --json memory.json

The engine answers at once with tiny states, because a real server would need hours; everything else is as in a run.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import multiprocessing
import os
import platform
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
from benchmarks.extract.stand_in import StandIn, info_of

from hsdump.cli.watching import Watch, run_session
from hsdump.engines.base import CapturedSample, CaptureRequest
from hsdump.extract.plan import ExtractOptions, make_plan
from hsdump.lean import be_lean
from hsdump.samples import TokenSample
from hsdump.schema import StateShape
from hsdump.store import StoreWriter

T = TypeVar("T")

SHAPE = StateShape(layers=(1,), hidden_size=4, dtype="bfloat16", final_state="post_norm")


class InstantEngine(StandIn):
    """Gives states of zeros without a server."""

    def __init__(self) -> None:
        super().__init__(info_of(SHAPE, vocab_size=1 << 20))

    async def capture(self, request: CaptureRequest) -> CapturedSample:
        states = tuple(np.zeros((len(request.input_ids), SHAPE.hidden_size), np.uint16) for _ in SHAPE.names)
        return CapturedSample(token_ids=request.input_ids, states=states)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--captured", type=int, default=200, help="more samples, by the measured run")
    parser.add_argument("--vocab", type=int, default=151_643, help="tokens of the tokenizer, which is loaded too")
    parser.add_argument("--folder", type=Path, help="keep input and store there, for the next measurement")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        model = in_child(make_tokenizer, folder / "tokenizer", args.vocab)
        rows, more, out = folder / f"rows-{args.samples}.jsonl", folder / "more.jsonl", folder / f"store-{args.samples}"
        options = ExtractOptions(inputs=(rows, more), out=out, model=model, disk_reserve=0, concurrency=64)
        if not rows.exists():
            write_rows(rows, range(args.samples))
            more.touch()
            in_child(fill, options, args.samples)
        first = args.samples + time.time_ns() % (1 << 30)  # others than an earlier measurement's
        write_rows(more, range(first, first + args.captured))
        found = measured(options)
    print(json.dumps(found))
    args.json.write_text(json.dumps(found, indent=1) + "\n")


def measured(options: ExtractOptions) -> dict[str, object]:
    be_lean(True)  # as `hsdump extract` is
    before = rss_bytes()
    started_s = time.monotonic()
    state = asyncio.run(run_session({"instant": InstantEngine()}, options, Watch(quiet=True)))
    assert state.exit_code() == 0, state.report()
    return {
        "machine": {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
        "torch_installed": importlib.util.find_spec("torch") is not None,
        "torch_in_process": "torch" in sys.modules,
        "input_samples": state.read,
        "already_committed": state.already,
        "captured": state.committed,
        "seconds": round(time.monotonic() - started_s, 1),
        "rss_before_bytes": before,
        "peak_rss_bytes": rss_bytes(),
    }


def in_child(function: Callable[..., T], *args: object) -> T:
    """Call it in a process of its own, whose memory is not counted."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def make_tokenizer(folder: Path, size: int) -> str:
    """Write a byte-level tokenizer with as many tokens as today's models have; its words are chance."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    chance = random.Random(1)
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab, merges = {word: number for number, word in enumerate(words)}, []
    while len(vocab) < size:
        pair = chance.choice(words[:5000]), chance.choice(words[:3000])
        if "".join(pair) not in vocab and len("".join(pair)) <= 16:
            vocab["".join(pair)] = len(vocab)
            words.append("".join(pair))
            merges.append(pair)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": words[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def write_rows(path: Path, indices: range) -> None:
    with path.open("w") as file:
        for index in indices:
            file.write(json.dumps({"id": f"row-{index}", "input_ids": tokens(index)}) + "\n")


def tokens(index: int) -> list[int]:
    return [index & 0x3FF, index >> 10 & 0x3FF, index >> 20 & 0x3FF, index >> 30, 7, 8, 9, 10]


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
