"""What is sent to a server, and how fast it is answered."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hsdump import connections
from hsdump.engines.base import CaptureRequest
from hsdump.engines.sglang_http import SglangEngine
from hsdump.samples import sample_key

T = TypeVar("T")
Samples = list[np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One mode's figures."""

    tokens_per_s: float
    seconds: float
    drained_s: float = 0.0
    """From the last response to the last byte where it belongs."""

    num_bytes: int = 0


def make_samples(count: int, length: int, vocab: int, seed: int) -> Samples:
    rng = np.random.default_rng(seed)
    return [rng.integers(10, vocab - 10, length).astype(np.int64) for _ in range(count)]


def in_flight(length: int) -> int:
    """Enough to keep prefill batches of 8,192 tokens full."""
    return max(8, 40960 // length)


def ordinary(
    url: str, samples: Samples, *, rid: str = "", hidden: bool = False, group: int = 0, at_once: int = 0
) -> Measured:
    """Send plain prefill requests; `rid` names them (the naive patch fires on `naive-`).

    SGLang puts hidden states only into responses that generate, so only the JSON mode asks for a token.

    Args:
        group: send so many at once and wait for all of them before the next; 0: no groups.
        at_once: most requests in flight; 0: so many as keep batches full.
    """

    async def run() -> Measured:
        slots = asyncio.Semaphore(at_once or in_flight(len(samples[0])))
        async with connections.client(url, timeout=600) as client:

            async def one(number: int, ids: np.ndarray) -> int:
                body: dict[str, Any] = {
                    "input_ids": ids.tolist(),
                    "sampling_params": {"max_new_tokens": int(hidden), "temperature": 0.0},
                    "extra_key": os.urandom(8).hex(),  # as hsdump's: nothing from the prefix cache
                    "rid": f"{rid}{number}-{os.urandom(6).hex()}" if rid != "exact-" else f"naive-{number}",
                }
                if hidden:
                    body["return_hidden_states"] = True
                async with slots:
                    response = await client.post("/generate", json=body)
                response.raise_for_status()
                return len(response.content)

            start = time.perf_counter()
            sizes = await in_groups([one(n, ids) for n, ids in enumerate(samples)], group)
            seconds = time.perf_counter() - start
        return Measured(tokens_per_s=sum(map(len, samples)) / seconds, seconds=seconds, num_bytes=sum(sizes))

    return asyncio.run(run())


def captured(
    url: str,
    samples: Samples,
    keep: dict[str, list[np.ndarray]] | None = None,
    *,
    group: int = 0,
    at_once: int = 0,
) -> Measured:
    """Send capture requests and take every sample out of the ring, or copy it into `keep`.

    `group` and `at_once`: as `ordinary`.
    """

    async def run() -> Measured:
        engine, slots = SglangEngine(url), asyncio.Semaphore(at_once or in_flight(len(samples[0])))
        await asyncio.to_thread(engine.handshake)
        responded: list[float] = []
        send = engine._send

        async def noting(*args: Any) -> Any:
            result = await send(*args)
            responded.append(time.perf_counter())
            return result

        engine._send = noting  # type: ignore[method-assign, assignment]  # a clock at the response
        num_bytes = 0

        async def one(ids: np.ndarray) -> None:
            nonlocal num_bytes
            key = sample_key(ids, np.ones(len(ids), dtype=np.uint8))
            async with slots:
                got = await engine.capture(CaptureRequest(key=key, input_ids=ids, attempt=0))
                num_bytes += sum(state.nbytes for state in got.states)
                if keep is not None:
                    keep[key] = [state.copy() for state in got.states]
                got.release()

        try:
            start = time.perf_counter()
            await in_groups([one(ids) for ids in samples], group)
            end = time.perf_counter()
        finally:
            await engine.close()
        seconds = end - start
        return Measured(
            tokens_per_s=sum(map(len, samples)) / seconds,
            seconds=seconds,
            drained_s=end - max(responded),
            num_bytes=num_bytes,
        )

    return asyncio.run(run())


async def in_groups(work: Sequence[Coroutine[None, None, T]], group: int) -> list[T]:
    """Await all at once, or so many at a time."""
    found: list[T] = []
    for start in range(0, len(work), group or len(work)):
        found += await asyncio.gather(*work[start : start + (group or len(work))])
    return found


def decode_gaps(url: str, vocab: int, seconds: float, *, users: int = 8) -> tuple[list[float], list[float]]:
    """Be ordinary users who read a stream; give the pauses between tokens and the whole answers' times, in seconds."""

    async def run() -> tuple[list[float], list[float]]:
        gaps: list[float] = []
        answers: list[float] = []
        deadline = time.perf_counter() + seconds
        rng = np.random.default_rng(5)
        async with connections.client(url, timeout=600) as client:

            async def user() -> None:
                while time.perf_counter() < deadline:
                    sampling = {"max_new_tokens": 64, "temperature": 0.0, "ignore_eos": True}
                    prompt = rng.integers(10, vocab - 10, 64).tolist()
                    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
                    last, asked = None, time.perf_counter()
                    async with client.stream("POST", "/generate", json=body) as stream:
                        async for line in stream.aiter_lines():
                            if not line.startswith("data:"):
                                continue
                            now = time.perf_counter()
                            if last is not None:
                                gaps.append(now - last)
                            last = now
                    answers.append(time.perf_counter() - asked)

            await asyncio.gather(*(user() for _ in range(users)))
        return gaps, answers

    return asyncio.run(run())


def write_rows(path: Path, samples: Samples) -> Path:
    with path.open("w") as file:
        for ids in samples:
            file.write(json.dumps({"input_ids": ids.tolist(), "loss_mask": [1] * len(ids)}) + "\n")
    return path


def read_naive(folder: Path, number: int, num_states: int) -> list[np.ndarray]:
    """Put one request's pieces of the naive patch together again, as bfloat16 bits."""
    import torch

    found = sorted(folder.glob(f"naive-{number}.*.pt"), key=lambda path: int(path.name.split(".")[1]))
    pieces = [torch.load(path, weights_only=True) for path in found]
    names = [f"aux{index}" for index in range(num_states - 1)] + ["final"]
    return [torch.cat([piece[name] for piece in pieces]).view(torch.int16).numpy().view(np.uint16) for name in names]
