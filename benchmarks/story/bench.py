"""Fourth stage: the real SGLang with the drafter beside the same without; on a CPU, decoding in one process before.

On a CPU SGLang decodes with the kernels of the tests' environment (tests/engine_env/sgl_kernel/speculative.py), so its
acceptance is what it is, and its speed says nothing. `hsdump eval` plays the same rounds with transformers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import httpx
from benchmarks.story.state import Story
from benchmarks.story.together import together

from hsdump import connections
from hsdump.draft.eval import read_prompts

START_S = {"cuda": 120.0, "cpu": 300.0}
"""At most, for all servers to come up side by side and answer once."""

LONG_S, SHORT_S, LOSSLESS_S = 130.0, 60.0, 50.0
"""What the first draft length takes, at all concurrencies; another one; the comparison of outputs."""

NEAR_TIE = 0.25
"""Four steps of bfloat16 between 8 and 16, where the largest logits lie: closer ones are decided by rounding."""

LIKELIEST = 8
"""Tokens looked at where outputs part."""

Tokens = list[int]


def bench_stage(story: Story) -> None:
    if story.device == "cpu":
        for steps in story.scale.steps:
            story.attempt(f"bench.eval-{steps}", 15, partial(evaluate, story, steps))
    if story.engine != "sglang":
        return
    names = [f"bench.steps-{steps}" for steps in story.scale.steps] + ["bench.lossless"]
    if all(story.figures(name) is not None for name in names):
        return
    story.need(START_S[story.device] + SHORT_S, "starting servers")
    wanted = [steps for steps in story.scale.steps if story.figures(f"bench.steps-{steps}") is None]
    wanted = sorted({*wanted, story.scale.steps[0]})
    starts = {str(steps): partial(story.serve, f"eagle-{steps}", *flags(story, steps)) for steps in wanted}
    starts["plain"] = partial(story.serve, "without", *story.scale.bench_flags)
    with together(starts, at_once=len(starts), needed=("plain",), note=story.note) as urls:
        with_servers(story, urls)


def with_servers(story: Story, urls: dict[str, str]) -> None:
    prompts, plain = questions(story), urls["plain"]
    up = [steps for steps in story.scale.steps if str(steps) in urls]
    for name, url in urls.items():  # kernels and graphs, once
        try:
            asyncio.run(answers(url, prompts[:16], 16, 16))
        except httpx.HTTPError as error:
            story.note(f"bench.warm-up-{name}", error)
    for steps in up:
        needs_s = LONG_S if steps == story.scale.steps[0] else SHORT_S
        story.attempt(f"bench.steps-{steps}", needs_s, partial(measure, story, urls[str(steps)], plain, steps))
    if up:
        compare(story, "bench.lossless", urls[str(up[0])], plain)


def flags(story: Story, steps: int) -> list[str]:
    """Give SGLang's options for a drafter with so many steps, top-k 1."""
    folder = story.work / "drafter-sglang"
    words = [
        *story.scale.bench_flags,
        "--speculative-algorithm",
        "EAGLE3",
        "--speculative-draft-model-path",
        str(folder),
    ]
    words += ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1"]
    return [*words, "--speculative-num-draft-tokens", str(steps + 1)]


def questions(story: Story) -> list[Tokens]:
    return [one.prompt for one in read_prompts(story.data / "test.jsonl", str(story.model), story.scale.test)]


def measure(story: Story, url: str, plain: str, steps: int) -> dict[str, Any]:
    """Bench one draft length beside the plain server; the first length at all concurrencies."""
    scale = story.scale
    many = steps == scale.steps[0]
    concurrency = ",".join(map(str, scale.concurrencies if many else scale.concurrencies[:1]))
    found = story.hsdump(
        *("bench", "--server", url, "--baseline", plain, "--prompts", story.data / "test.jsonl"),
        *("--model", story.model, "--concurrency", concurrency, "--limit", scale.test if many else scale.test // 4),
        *("--new-tokens", scale.bench_new_tokens),
        codes=(0, 3),  # 3: some request failed, which its row says
    )
    rows, before = found["rows"], {row["concurrency"]: row for row in found["baseline"]}
    return {"steps": steps, "rows": [with_arithmetic(row, before[row["concurrency"]]) for row in rows]}


def with_arithmetic(row: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Say what a round costs beside a plain forward: the acceptance length from which on a drafter gains time."""
    found = {**row, "plain_tokens_per_s": before["tokens_per_s"]}
    found["speedup"] = round(row["tokens_per_s"] / before["tokens_per_s"], 4)
    if row.get("acceptance_length"):
        found["break_even_length"] = round(row["acceptance_length"] / found["speedup"], 4)
        if row["concurrency"] == 1:
            found["round_ms"] = round(1e3 * row["seconds"] / row["drafts"], 3)
            found["plain_forward_ms"] = round(1e3 * before["seconds"] / before["tokens"], 3)
    return found


async def answers(
    url: str, prompts: Sequence[Tokens], new_tokens: int, at_once: int, **more: Any
) -> list[dict[str, Any]]:
    """Have prompts answered greedily; the replies in order."""
    slots = asyncio.Semaphore(at_once)
    async with connections.client(url, timeout=300) as client:

        async def one(ids: Tokens) -> dict[str, Any]:
            params = {"max_new_tokens": new_tokens, "temperature": 0}
            async with slots:
                reply = await client.post("/generate", json={"input_ids": ids, "sampling_params": params, **more})
            reply.raise_for_status()
            return dict(reply.json())

        return list(await asyncio.gather(*map(one, prompts)))


def compare(story: Story, step: str, drafting: str, plain: str, near_tie: float = NEAR_TIE) -> None:
    """Compare the outputs of two servers on half of the questions."""
    prompts = questions(story)
    some = prompts[: max(len(prompts) // 2, 1)]
    story.attempt(step, LOSSLESS_S, lambda: lossless(drafting, plain, some, story.scale.bench_new_tokens, near_tie))


def lossless(
    url: str, plain: str, prompts: Sequence[Tokens], new_tokens: int, near_tie: float = NEAR_TIE
) -> dict[str, Any]:
    """Compare greedy outputs token by token, one request at a time; where two part, the plain server's logits of both
    tokens say how near they are to its best: by at most `near_tie` it is a near tie.
    """

    async def each_its_own() -> list[list[dict[str, Any]]]:
        return await asyncio.gather(*(answers(one, prompts, new_tokens, 1) for one in (url, plain)))

    ours, theirs = ([list(reply["output_ids"]) for reply in replies] for replies in asyncio.run(each_its_own()))
    again = [list(reply["output_ids"]) for reply in asyncio.run(answers(plain, prompts, new_tokens, 16))]
    parted = []
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            place = first_difference(one, other)
            chosen = [tokens[place] if place < len(tokens) else None for tokens in (one, other)]
            parted.append(
                {"prompt": number, "place": place, **how_near(plain, [*prompts[number], *other[:place]], chosen)}
            )
    near = [one for one in parted if one["margin"] is not None and one["margin"] <= near_tie]
    equal = len(prompts) - len(parted)
    return {
        "requests": len(prompts),
        "near_tie": near_tie,
        "identical": equal,
        "identical_share": round(equal / len(prompts), 4),
        "differing_at_a_near_tie": len(near),
        "differing_otherwise": len(parted) - len(near),
        "plain_against_itself_at_16": sum(one == other for one, other in zip(theirs, again, strict=True)),
        "parted": parted,
    }


def first_difference(one: Tokens, other: Tokens) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def how_near(url: str, ids: Tokens, chosen: Sequence[int | None]) -> dict[str, Any]:
    """Ask for the likeliest next tokens, whose log-probabilities differ as their logits do: how far below the best the
    lower one of those chosen with and without drafts is. None where one of them is not even among the likeliest.
    """
    [reply] = asyncio.run(answers(url, [ids], 1, 1, return_logprob=True, top_logprobs_num=LIKELIEST))
    best = {int(entry[1]): round(float(entry[0]), 4) for entry in reply["meta_info"]["output_top_logprobs"][0]}
    found = [best[token] for token in chosen if token in best]
    margin = round(max(best.values()) - min(found), 4) if len(found) == len(chosen) else None
    two = dict(list(best.items())[:2])
    return {"chosen": list(chosen), "tokens": list(two), "logprobs": list(two.values()), "margin": margin}


def evaluate(story: Story, steps: int) -> dict[str, Any]:
    """Decode the same questions in this process, and without drafts for comparison."""
    words: tuple[object, ...] = ("eval", story.drafter, "--prompts", story.data / "test.jsonl", "--model", story.model)
    words += ("--draft-tokens", steps, "--new-tokens", story.scale.bench_new_tokens, "--limit", story.scale.test)
    if steps == story.scale.steps[0]:
        words += ("--store", story.store, "--untrained")
    found = story.hsdump(*words, codes=(0, 1))
    names = ("forced", "walked", "lossless", "differing", "near_ties", "untrained", "seconds", "command_seconds")
    return {"steps": steps, "engine": "transformers, in one process", **{name: found[name] for name in names}}
