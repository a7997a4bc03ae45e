"""What capture costs on a CPU machine, side by side in one run.

    .venv/bin/python benchmarks/capture_cpu/overhead.py --sglang-python .venv-sglang/bin/python --model MODEL

Modes, all on the real SGLang with the same token ids, prefill only, 8 requests in flight:

- `plain`      a server without hsdump in its environment
- `ordinary`   ordinary requests on a server that has capture on
- `shm`        hsdump's requests on that same server, taken from shared memory and dropped
- `json`       SGLang's own way out (`--enable-return-aux-hidden-states`), without the final state

`ordinary` and `shm` alternate on one server, so their ratio is free of drift between servers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from hsdump.engines.base import CaptureRequest
from hsdump.engines.sglang_http import SglangEngine
from hsdump.samples import sample_key

IN_FLIGHT = 8
CPU_ENV = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
CPU_ARGS = ["--device", "cpu", "--attention-backend", "torch_native", "--host", "127.0.0.1"]


def main() -> None:
    args = parse_args()
    rng = np.random.default_rng(0)
    samples = [rng.integers(3, args.vocab, args.length).astype(np.int64) for _ in range(args.samples)]
    few = samples[: args.json_samples]
    rates: dict[str, list[float]] = {"plain": [], "ordinary": [], "shm": [], "json": []}
    with server(args, []) as url:
        warm_up(url, samples)
        rates["plain"] = [asyncio.run(ordinary(url, samples))[0] for _ in range(args.rounds)]
    with server(args, [], capture=True) as url:
        warm_up(url, samples)
        for _ in range(args.rounds):
            rates["ordinary"].append(asyncio.run(ordinary(url, samples))[0])
            rates["shm"].append(asyncio.run(captured(url, samples)))
    json_bytes = 0
    with server(args, json_flags()) as url:
        warm_up(url, samples)
        for _ in range(args.rounds):
            rate, json_bytes = asyncio.run(ordinary(url, few, hidden=True))
            rates["json"].append(rate)
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
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args()


def json_flags() -> list[str]:
    return [
        "--enable-return-hidden-states",
        "--enable-return-aux-hidden-states",
        "--speculative-algorithm",
        "EAGLE3",
    ]


@contextmanager
def server(args: argparse.Namespace, flags: list[str], *, capture: bool = False) -> Iterator[str]:
    """Start the real SGLang and stop it by its own process group."""
    with socket.socket() as probe:
        port = random.randrange(20000, 30000)  # SGLang derives others from it: port + 10,000 must be one
        probe.bind(("127.0.0.1", port))
    options = [*CPU_ARGS, "--model-path", args.model, "--port", str(port), "--chunked-prefill-size", str(args.chunk)]
    options += ["--mem-fraction-static", "0.1", "--max-total-tokens", "40000", *flags]
    command = [args.sglang_python, "-m", "sglang.launch_server", *options]
    if capture:
        command = [sys.executable, "-m", "hsdump.cli.main", "serve", "--python", args.sglang_python, "--", *options]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        command,
        env={**os.environ, **CPU_ENV},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    try:
        wait_until_up(url, process)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_up(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"the server did not come up ({process.args})")


def warm_up(url: str, samples: list[np.ndarray]) -> None:
    asyncio.run(ordinary(url, samples[:IN_FLIGHT]))


async def ordinary(url: str, samples: list[np.ndarray], *, hidden: bool = False) -> tuple[float, int]:
    """Send prefill-only requests that are not hsdump's; give tokens per second and the bytes of the responses.

    SGLang puts hidden states only into responses that generate, so the JSON mode asks for one token.
    """
    slots = asyncio.Semaphore(IN_FLIGHT)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def one(ids: np.ndarray) -> int:
            body: dict[str, Any] = {
                "input_ids": ids.tolist(),
                "extra_key": os.urandom(8).hex(),
                "sampling_params": {"max_new_tokens": int(hidden), "temperature": 0.0},
            }
            if hidden:
                body["return_hidden_states"] = True
            async with slots:
                response = await client.post("/generate", json=body)
            response.raise_for_status()
            return len(response.content)

        start = time.perf_counter()
        num_bytes = sum(await asyncio.gather(*map(one, samples)))
        return sum(map(len, samples)) / (time.perf_counter() - start), num_bytes


async def captured(url: str, samples: list[np.ndarray]) -> float:
    """Send the same samples as capture requests and take every entry out of shared memory; give tokens per second.

    The handshake, once in a run of hours, is not in the time.
    """
    engine, slots = SglangEngine(url), asyncio.Semaphore(IN_FLIGHT)
    engine.handshake()

    async def one(ids: np.ndarray) -> None:
        key = sample_key(ids, np.ones(len(ids), dtype=np.uint8))
        async with slots:
            sample = await engine.capture(CaptureRequest(key=key, input_ids=ids, attempt=0))
        sample.release()

    try:
        start = time.perf_counter()
        await asyncio.gather(*map(one, samples))
        return sum(map(len, samples)) / (time.perf_counter() - start)
    finally:
        await engine.close()


def write_results(args: argparse.Namespace, rates: dict[str, list[float]], json_bytes_per_token: float) -> None:
    median = {mode: statistics.median(values) for mode, values in rates.items()}
    pairs = [shm / ordinary for shm, ordinary in zip(rates["shm"], rates["ordinary"], strict=True)]
    config = json.loads((Path(args.model) / "config.json").read_text())
    raw = 4 * config["hidden_size"] * 2
    result = {
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "versions": {"sglang": sglang_version(args.sglang_python), "hsdump": hsdump_version()},
        "command": f"benchmarks/capture_cpu/overhead.py --length {args.length} --samples {args.samples} "
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
