"""5,000 samples through two servers that others use: what ordinary requests take with and without it, and say.

    python -m benchmarks.extract.live --json live.json

Two real SGLang servers on the CPU, each with ordinary clients (greedy, 16 new tokens, a short think time). First they
are alone; then the same store is filled under one setting after the other, each for a while; then the rest is captured.
The answers must be what they were, the store must verify.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tests.server.driving import Answer, _ask, same_or_near_tie, write_rows
from tests.server.harness import SglangServer
from tests.tiny_models import tiny_model_path

from hsdump import connections
from hsdump.samples import TokenSample
from hsdump.store import Store
from hsdump.verify import VerifyOptions, verify_store

CLIENTS = 2
"""Ordinary ones at each server."""

THINK_S = 0.2
NEW_TOKENS = 16

SETTINGS: dict[str, list[str]] = {
    "no politeness": ["--live-share", "1"],
    "steps back (default, a quarter of the time)": [],
    "--max-rate 300": ["--live-share", "1", "--max-rate", "300"],
    "--max-rate 300, steps back": ["--max-rate", "300"],
}


def mixed_samples(count: int) -> list[TokenSample]:
    """Make samples of 8 to 2,000 tokens, most of them short (median about 25), so that two cores can do them."""
    rng = np.random.default_rng(5)
    lengths = np.clip(np.exp(rng.normal(3.2, 0.7, count)), 8, 2000).astype(int)
    lengths[:: max(count // 25, 1)] = np.linspace(300, 2000, len(lengths[:: max(count // 25, 1)])).astype(int)
    return [
        TokenSample.make(f"mixed-{i}", rng.integers(3, 2048, n), np.ones(n, dtype=np.uint8))
        for i, n in enumerate(lengths)
    ]


async def live_traffic(urls: list[str], seconds: float) -> tuple[list[float], dict[tuple[str, int], Answer]]:
    """Be ordinary users for a while; give latencies in seconds, and the last answer to each prompt."""
    rng = np.random.default_rng(9)
    prompts = [rng.integers(3, 2048, length).tolist() for length in rng.integers(10, 60, 12)]
    latencies: list[float] = []
    answers: dict[tuple[str, int], Answer] = {}
    end_s = time.monotonic() + seconds

    async def user(url: str, first: int) -> None:
        place = first
        async with connections.client(url, timeout=300) as client:
            while time.monotonic() < end_s:
                started_s = time.monotonic()
                answers[url, place % len(prompts)] = await _ask(client, prompts[place % len(prompts)], NEW_TOKENS)
                latencies.append(time.monotonic() - started_s)
                place += 1
                await asyncio.sleep(THINK_S)

    await asyncio.gather(*(user(url, 6 * number) for url in urls for number in range(CLIENTS)))
    return latencies, answers


def quantiles(latencies: list[float]) -> dict[str, float]:
    p50, p95 = np.quantile(latencies, [0.5, 0.95])
    return {"requests": len(latencies), "p50_s": round(float(p50), 4), "p95_s": round(float(p95), 4)}


def start_extract(rows: Path, urls: list[str], out: Path, more: list[str]) -> subprocess.Popen[str]:
    servers = [word for url in urls for word in ("--server", url)]
    command = [sys.executable, "-m", "hsdump.cli.main", "extract", str(rows), *servers, "--out", str(out), "--json"]
    return subprocess.Popen([*command, "--commit-seconds", "1", *more], stdout=subprocess.PIPE, text=True)


def one_setting(rows: Path, urls: list[str], out: Path, more: list[str], seconds: float) -> tuple[dict[str, Any], Any]:
    """Extract under one setting while others are there, then stop with one Ctrl-C."""
    before = len(list((out / "shards").glob("*"))) if out.exists() else 0
    process = start_extract(rows, urls, out, more)
    while len(list((out / "shards").glob("*"))) <= before and process.poll() is None:
        time.sleep(0.05)  # imports and handshake are over
    latencies, answers = asyncio.run(live_traffic(urls, seconds))
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=300)
    report = json.loads(text)
    assert process.returncode == 4, report
    return {**quantiles(latencies), "tokens_per_s": report["tokens_per_s"], "committed": report["committed"]}, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=45.0, help="for each setting")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    samples = mixed_samples(args.samples)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        place, model = Path(folder), tiny_model_path("llama")
        servers = [
            stack.enter_context(SglangServer(model=model, log=place / f"{name}.log", sglang_args=())) for name in "ab"
        ]
        urls = [server.url for server in servers]
        rows, out = write_rows(place / "rows.jsonl", samples), place / "store"
        release = httpx.get(f"{urls[0]}/server_info").json()["version"]
        asyncio.run(live_traffic(urls, 8.0))
        latencies, expected = asyncio.run(live_traffic(urls, args.seconds))
        alone, settings, unchanged = quantiles(latencies), {}, 0
        for name, more in SETTINGS.items():
            found, answers = one_setting(rows, urls, out, more, args.seconds)
            assert all(same_or_near_tie(answers[key], expected[key]) for key in answers.keys() & expected.keys())
            unchanged += len(answers)
            found["p50_ratio"] = round(found["p50_s"] / alone["p50_s"], 2)
            found["p95_ratio"] = round(found["p95_s"] / alone["p95_s"], 2)
            settings[name] = found
            print(name, found, flush=True)
        process = start_extract(rows, urls, out, [])
        rest = json.loads(process.communicate()[0])
        assert process.returncode == 0, rest
        with Store(out) as store:
            assert sorted(store.keys()) == sorted(sample.key for sample in samples)
        verified = verify_store(out, VerifyOptions(), lambda _samples, _num_bytes: None).exit_code
        assert verified == 0
        whole = {
            "machine": {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
            "sglang": release,
            "samples": len(samples),
            "tokens": sum(len(sample.input_ids) for sample in samples),
            "ordinary_clients": CLIENTS * len(urls),
            "answers_compared": unchanged,
            "alone": alone,
            "settings": settings,
            "rest_without_others": {"committed": rest["committed"], "tokens_per_s": rest["tokens_per_s"]},
            "verify_exit_code": verified,
        }
    args.json.write_text(json.dumps(whole, indent=1) + "\n")
    write_table(whole, args.json.with_suffix(".md"))


def write_table(whole: dict[str, Any], path: Path) -> None:
    alone = whole["alone"]
    lines = [
        "# Extraction beside ordinary requests",
        "",
        f"{whole['samples']:,} samples (8 to 2,000 tokens, {whole['tokens']:,} in all) through two SGLang servers",
        f"({whole['sglang']}) on the CPU: {whole['machine']['cpus']} cores for all, with",
        f"{whole['ordinary_clients']} ordinary clients beside. `python -m benchmarks.extract.live --json live.json`",
        "",
        f"All committed, verify clean. {whole['answers_compared']} greedy answers compared with those before:",
        "the same, up to near ties (tests/server/driving.py). Alone, ordinary requests take",
        f"{alone['p50_s']:.3f} s (p50) and {alone['p95_s']:.3f} s (p95).",
        "",
        "| setting | p50 | p95 | p50 ratio | p95 ratio | captured tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    for name, s in whole["settings"].items():
        cells = (name, s["p50_s"], s["p95_s"], s["p50_ratio"], s["p95_ratio"], round(s["tokens_per_s"]))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    rest = whole["rest_without_others"]
    lines += ["", f"Without others the rest went at {rest['tokens_per_s']:.0f} tokens/s."]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
