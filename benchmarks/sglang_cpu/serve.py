"""Real speculative decoding in SGLang on a CPU: our exported drafter, greedy, beside the same server without it.

    python -m benchmarks.sglang_cpu.serve --target TARGET --drafter DRAFTER --exported FOLDER --prompts test.jsonl \
        --out result.json

The server is that of the tests (`make engines`): SGLang's own scheduler, EAGLE worker and drafter class; its AMX
kernels replaced by plain torch (tests/engine_env/sgl_kernel/speculative.py). So acceptance is SGLang's;
speed says nothing. float32, so that a batch of one token and one of four round alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.serving.predicted import predict
from benchmarks.story.bench import answers
from tests.server.harness import SglangServer, free_port
from tests.server.test_speculation import drafts

from hsdump.draft.bench import rates_of
from hsdump.draft.sweep import Launch, parse_settings, sweep

PRECISION = ("--dtype", "float32")
SETTINGS = "1:1:2,2:1:3,3:1:4,5:1:6,3:2:8,3:4:16"


def counted(replies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum what the server counted of its drafts."""
    metas = [reply["meta_info"] for reply in replies]
    rounds = sum(meta["spec_verify_ct"] for meta in metas)
    return {
        "drafts": rounds,
        "per_position": rates_of([meta["spec_correct_drafts_histogram"] for meta in metas]),
        "acceptance_length": sum(meta["completion_tokens"] for meta in metas) / rounds,
    }


def said(replies: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [reply["output_ids"] for reply in replies]


def same(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> int:
    return sum(list(a) == list(b) for a, b in zip(one, other, strict=True))


def swept(options: argparse.Namespace, prompts: Sequence[Sequence[int]], log: Path) -> list[dict[str, Any]]:
    """`hsdump bench --sweep` over chains and trees."""
    args = (*PRECISION, *drafts(options.exported, "{steps}", "{topk}", "{tokens}"))
    server = SglangServer(model=options.target, log=log, capture=False, sglang_args=args, port=free_port())
    environment = [f"{name}={value}" for name, value in server.environment().items()]
    launch = Launch(url=server.url, command=shlex.join(["env", *environment, *server.command()]), log=log)
    found = sweep(launch, parse_settings(SETTINGS), prompts, concurrencies=[4], new_tokens=options.new_tokens)
    return [{"setting": str(one.setting), **msgspec.to_builtins(one.rows[0])} for one in found.settings]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang_cpu.serve")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True, help="folder of `hsdump train`")
    parser.add_argument("--exported", type=Path, required=True, help="folder of `hsdump export --to sglang`")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    options.target, options.exported = options.target.resolve(), options.exported.resolve()
    walks, predicted = predict(options.drafter, options.target, options.prompts, options.new_tokens)
    prompts = [walked.prompt for walked in walks]
    folder = Path(tempfile.mkdtemp(prefix="sglang-cpu-"))
    result: dict[str, Any] = {
        "engine": "SGLang 0.5.23, float32, greedy, AMX kernels in plain torch",
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "prompts": len(prompts),
        "new_tokens": options.new_tokens,
        "predicted": predicted,
    }
    with SglangServer(model=options.target, log=folder / "plain", capture=False, sglang_args=PRECISION) as server:
        plain = said(asyncio.run(answers(server.url, prompts, options.new_tokens, 1)))
    result["plain_equals_transformers"] = same(plain, [walked.plain for walked in walks])
    args = (*PRECISION, *drafts(options.exported, 3, 1, 4))
    with SglangServer(model=options.target, log=folder / "drafts", capture=False, sglang_args=args) as server:
        for name, at_once in (("one at a time", 1), ("four at a time", 4)):
            replies = asyncio.run(answers(server.url, prompts, options.new_tokens, at_once))
            result[name] = {**counted(replies), "identical_outputs": same(said(replies), plain)}
            print(name, json.dumps(result[name]), flush=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    result["sweep"] = swept(options, prompts, folder / "sweep")
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
