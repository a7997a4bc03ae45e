"""Driving a real server in tests: samples of our own, captures, ordinary traffic, and transformers as the oracle.

Letters: S = tokens of one sample, H = hidden size.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from hsdump.arrays import to_float32
from hsdump.engines.base import CaptureRequest
from hsdump.engines.sglang_http import SglangEngine
from hsdump.samples import TokenSample
from hsdump.schema import EngineInfo, StateShape
from hsdump.store import Store

TOLERANCE = 2e-2
"""Relative error of a state against transformers in bfloat16. Rounding noise measured on these models: 0.007 to 0.009
(two implementations add up in different orders); a layer off by one gives 0.3 and more."""

States = dict[str, list[NDArray[np.float32]]]
"""key -> the L+1 states [S, H] of that sample."""


def token_samples(count: int, vocab_size: int, *, seed: int = 0, longest: int = 300) -> list[TokenSample]:
    """Make samples of random tokens; half of them begin with one of two shared prefixes, as system prompts do."""
    rng = np.random.default_rng(seed)
    prefixes = [rng.integers(3, vocab_size, length) for length in (100, 130)]
    samples = []
    for index in range(count):
        ids = rng.integers(3, vocab_size, rng.integers(5, longest))
        if index % 2:
            ids = np.concatenate([prefixes[index // 2 % 2], ids])
        mask = (np.arange(len(ids)) >= len(ids) // 2).astype(np.uint8)
        samples.append(TokenSample.make(f"random-{seed}-{index}", ids.astype(np.int64), mask))
    return samples


def write_rows(path: Path, samples: Iterable[TokenSample]) -> Path:
    """Write samples as `extract` reads ready-made tokens."""
    rows = ({"id": s.source, "input_ids": s.input_ids.tolist(), "loss_mask": s.loss_mask.tolist()} for s in samples)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def conversations() -> list[dict[str, Any]]:
    """Give the project's own conversations, or those in the file that HSDUMP_TEST_CONVERSATIONS names."""
    named = os.environ.get("HSDUMP_TEST_CONVERSATIONS")
    path = Path(named) if named else Path(__file__).parents[2] / "src/hsdump/demo/prompts.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def capture(url: str, samples: Sequence[TokenSample], *, in_flight: int = 16) -> tuple[EngineInfo, States]:
    """Capture samples through the engine, without a store."""

    async def run() -> tuple[EngineInfo, States]:
        engine, slots, states = SglangEngine(url), asyncio.Semaphore(in_flight), {}
        info = engine.handshake()

        async def one(sample: TokenSample) -> None:
            async with slots:
                got = await engine.capture(CaptureRequest(key=sample.key, input_ids=sample.input_ids, attempt=0))
            states[sample.key] = [to_float32(state, info.shape.dtype) for state in got.states]
            got.release()

        try:
            await asyncio.gather(*map(one, samples))
        finally:
            await engine.close()
        return info, states

    return asyncio.run(run())


def stored(path: Path) -> tuple[StateShape, States, dict[str, NDArray[np.int64]]]:
    """Read a whole store back: its states widened to float32, and its token ids."""
    with Store(path) as store:
        shape = store.manifest.shape
        samples = {sample.key: sample for sample in store}
        states = {k: [to_float32(s.states[n], shape.dtype) for n in shape.names] for k, s in samples.items()}
        return shape, states, {key: np.array(sample.input_ids) for key, sample in samples.items()}


@cache
def model(path: Path) -> Any:
    """Load the oracle once a test run."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


def reference(path: Path, ids: NDArray[np.int64], layers: Sequence[int]) -> list[NDArray[np.float32]]:
    """Compute the same states with transformers, one sample alone."""
    with torch.no_grad():
        hidden = model(path)(torch.tensor(ids)[None], output_hidden_states=True, use_cache=False).hidden_states
    return [hidden[layer][0].float().numpy() for layer in (*layers, -1)]


def relative_error(found_SH: NDArray[np.float32], expected_SH: NDArray[np.float32]) -> float:
    """Frobenius norm of the difference over that of the expected; infinite when a row is missing or too many."""
    if found_SH.shape != expected_SH.shape:
        return float("inf")
    return float(np.linalg.norm(found_SH - expected_SH) / np.linalg.norm(expected_SH))


def worst_error(found: States, expected: States) -> float:
    """Give the largest relative error over all samples and states of two captures of the same samples."""
    assert found.keys() == expected.keys()
    return max(
        relative_error(a, b) for key, states in found.items() for a, b in zip(states, expected[key], strict=True)
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """What an ordinary user got."""

    output_ids: tuple[int, ...]
    cached_tokens: int
    margins: tuple[float, ...]
    """Log-probability of the chosen token minus the runner-up's, per generated token."""


async def _ask(client: httpx.AsyncClient, ids: Sequence[int], num_new: int) -> Answer:
    sampling = {"max_new_tokens": num_new, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
    response = await client.post("/generate", json=body)
    response.raise_for_status()
    answer = response.json()
    meta = answer["meta_info"]
    margins = tuple(top[0][0] - top[1][0] for top in meta["output_top_logprobs"])
    return Answer(tuple(answer["output_ids"]), meta["cached_tokens"], margins)


async def ordinary_traffic(
    url: str, prompts: Sequence[Sequence[int]], *, at_once: int, num_new: int = 8
) -> list[Answer]:
    """Be ordinary users: greedy answers to prompts, so many at a time."""
    slots = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def one(ids: Sequence[int]) -> Answer:
            async with slots:
                return await _ask(client, ids, num_new)

        return list(await asyncio.gather(*map(one, prompts)))


def same_or_near_tie(found: Answer, expected: Answer, near: float = 0.05) -> bool:
    """Tell whether two greedy answers agree up to a choice that bfloat16 noise may turn.

    Another batch composition changes the order of additions, so logits differ by about 1 %; random weights have many
    near ties. `near` is in nats: logits of these models are of order 1, 1 % of that is 0.01, doubled for two logits and
    again for safety.
    """
    for position, (a, b) in enumerate(zip(found.output_ids, expected.output_ids, strict=True)):
        if a != b:
            return min(found.margins[position], expected.margins[position]) < near
    return True
