"""`hsdump bench`: what a drafter is worth in a running server, from the server's own counters.

Acceptance comes from what the server counts (SGLang: `meta_info` of answers; vLLM: `/metrics`), speed from the clock,
with and without the drafter, side by side.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

from hsdump import connections
from hsdump.engines.handshake import server_facts
from hsdump.errors import ServerError, UsageError

CONCURRENCIES = (1, 4, 16)

HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
"""What releases of SGLang call it: rounds by how many tokens of the draft were taken."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """One server at one concurrency."""

    concurrency: int
    requests: int
    failed: int
    tokens: int
    seconds: float
    tokens_per_s: float
    acceptance_length: float | None = None
    """Tokens a forward of the target, the bonus token counted; None where the server counts none."""

    per_position: list[float] = []
    drafts: int = 0


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """A server with a drafter, and one without."""

    server: str
    engine: str
    rows: list[Speed]
    baseline: list[Speed] = []

    def speedups(self) -> dict[int, float]:
        """Tokens/s with the drafter over tokens/s without, by concurrency."""
        before = {row.concurrency: row.tokens_per_s for row in self.baseline}
        return {
            row.concurrency: row.tokens_per_s / before[row.concurrency]
            for row in self.rows
            if before.get(row.concurrency)
        }


class Server:
    """SGLang or vLLM over HTTP; which of them it is says the server."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.engine, self.model = self._recognise()
        self.draft_steps = self._draft_steps()
        """Depth of SGLang's drafts; 0 where it makes none or does not say."""

    def _get(self, path: str) -> httpx.Response:
        try:
            return httpx.get(self.url + path, headers=self._headers, timeout=30)
        except httpx.HTTPError as error:
            fix = "start the server, or give another --server"
            raise ServerError(f"nothing answers at {self.url} ({type(error).__name__})", fix) from error

    def _recognise(self) -> tuple[str, str]:
        reply = self._get("/v1/models")
        if reply.status_code != 200:
            raise ServerError(f"{self.url} answers {reply.status_code} to /v1/models", "name SGLang's or vLLM's URL")
        entry = reply.json()["data"][0]
        engine = "vllm" if entry.get("owned_by") == "vllm" else "sglang"
        return engine, str(entry["id"])

    def _draft_steps(self) -> int:
        if self.engine != "sglang":
            return 0
        try:
            steps = server_facts(self.url, self._headers).get("speculative_num_steps")
        except ServerError:  # a router, say: the figure is one to do without
            return 0
        return steps if isinstance(steps, int) else 0

    async def ask(self, client: httpx.AsyncClient, ids: Sequence[int], new_tokens: int) -> dict[str, Any]:
        """Have one prompt answered greedily. Gives `tokens`, and SGLang's counts of its drafts."""
        if self.engine == "vllm":
            body = {"model": self.model, "prompt": list(ids), "max_tokens": new_tokens, "temperature": 0}
            reply = await client.post(f"{self.url}/v1/completions", json=body, headers=self._headers)
            reply.raise_for_status()
            return {"tokens": int(reply.json()["usage"]["completion_tokens"])}
        params = {"max_new_tokens": new_tokens, "temperature": 0}
        body = {"input_ids": list(ids), "sampling_params": params}
        reply = await client.post(f"{self.url}/generate", json=body, headers=self._headers)
        reply.raise_for_status()
        meta = reply.json()["meta_info"]
        histogram: list[int] = next((meta[name] for name in HISTOGRAMS if meta.get(name)), [])
        return {
            "tokens": int(meta["completion_tokens"]),
            "verify": int(meta.get("spec_verify_ct") or 0),
            "histogram": [int(count) for count in histogram],
        }

    def counters(self) -> dict[str, float]:
        """Read vLLM's counters of drafts; empty for SGLang, whose answers carry them."""
        return parse_counters(self._get("/metrics").text) if self.engine == "vllm" else {}


def parse_counters(text: str) -> dict[str, float]:
    """Sum vLLM's `spec_decode` counters over engines: `drafts`, and `0`, `1`, ... for tokens taken at each place."""
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^vllm:spec_decode_(\w+)_total\{([^}]*)\} (\S+)$", text, re.MULTILINE):
        place = re.search(r'position="(\d+)"', labels)
        key = place.group(1) if place else {"num_drafts": "drafts"}.get(name, name)
        found[key] = found.get(key, 0.0) + float(value)
    return found


def acceptance(before: dict[str, float], after: dict[str, float]) -> tuple[float | None, list[float], int]:
    """Give acceptance length, rate per position and drafts between two readings of the counters."""
    drafts = after.get("drafts", 0.0) - before.get("drafts", 0.0)
    if drafts <= 0:
        return None, [], 0
    places = sorted((key for key in after if key.isdigit()), key=int)
    taken = [after[key] - before.get(key, 0.0) for key in places]
    return 1.0 + sum(taken) / drafts, [count / drafts for count in taken], int(drafts)


def rates_of(histograms: Sequence[Sequence[int]], steps: int = 0) -> list[float]:
    """Give the share of rounds in which the token at each place was taken, from SGLang's histograms of answers.

    Args:
        steps: places there are at least; a histogram ends at the last one that was ever taken.
    """
    longest = max((steps + 1, *(len(one) for one in histograms)))
    rounds = [sum(one[taken] for one in histograms if taken < len(one)) for taken in range(longest)]
    total = sum(rounds)
    return [sum(rounds[place:]) / total for place in range(1, longest)] if total else []


async def _measure(server: Server, prompts: Sequence[Sequence[int]], concurrency: int, new_tokens: int) -> Speed:
    before, slots = server.counters(), asyncio.Semaphore(concurrency)
    async with connections.client(server.url, timeout=600) as client:

        async def one(ids: Sequence[int]) -> dict[str, Any] | None:
            async with slots:
                try:
                    return await server.ask(client, ids, new_tokens)
                except (httpx.HTTPError, KeyError, ValueError):
                    return None  # counted below, and in the exit code

        began_s = time.monotonic()
        replies = await asyncio.gather(*(one(ids) for ids in prompts))
        seconds = time.monotonic() - began_s
    good = [reply for reply in replies if reply is not None]
    length, rates, drafts = acceptance(before, server.counters())
    tokens = sum(reply["tokens"] for reply in good)
    verified = sum(reply.get("verify", 0) for reply in good)
    if server.engine == "sglang" and verified:
        length, drafts = tokens / verified, verified
        rates = rates_of([reply["histogram"] for reply in good], server.draft_steps)
    return Speed(
        concurrency=concurrency,
        requests=len(prompts),
        failed=len(prompts) - len(good),
        tokens=tokens,
        seconds=round(seconds, 3),
        tokens_per_s=tokens / seconds,
        acceptance_length=length,
        per_position=rates,
        drafts=drafts,
    )


def bench(
    url: str,
    prompts: Sequence[Sequence[int]],
    *,
    baseline: str | None = None,
    concurrencies: Sequence[int] = CONCURRENCIES,
    new_tokens: int = 128,
    key: str | None = None,
) -> Bench:
    """Measure a server with a drafter, and one without.

    Raises:
        ServerError: nothing answers, or it is neither SGLang nor vLLM.
        UsageError: nothing to ask.
    """
    if not prompts:
        raise UsageError("there is no prompt to ask", "give --prompts FILE with questions")
    server = Server(url, key=key)
    rows = [asyncio.run(_measure(server, prompts, number, new_tokens)) for number in concurrencies]
    other: list[Speed] = []
    if baseline is not None:
        plain = Server(baseline, key=key)
        other = [asyncio.run(_measure(plain, prompts, number, new_tokens)) for number in concurrencies]
    return Bench(server=url, engine=server.engine, rows=rows, baseline=other)
