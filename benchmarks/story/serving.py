"""Second stage: the target in the real SGLang answers, its states are extracted, verified and proved, and hsdump goes.

A server with capture and one without stand side by side, each idle while the other is measured. On a GPU they start at
once; on a few cores, where a start takes all of them, the second one starts when it is needed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from benchmarks.serving.load import Samples, captured, ordinary, write_rows
from benchmarks.story.state import StepFailed, Story, afresh
from benchmarks.story.together import together
from benchmarks.story.writer import writing

from hsdump.prompts import Skip
from hsdump.prompts.inputs import read_rows

STEPS = ("serve.generate", "serve.extract", "serve.verify", "serve.prove", "serve.probe", "serve.rates")
START_S = 130.0
"""At most, for servers to come up."""

RATE_ROW, RATE_TOKENS = 1500, 750_000
"""Tokens of a request, and of a reading of the rate. An answer's 180 tokens take a small model less time than their
request takes HTTP, so answers are joined."""

OTHER_TOKENS = "are other tokens than the served tokenizer makes"
"""What `hsdump prove` says of it."""

READINGS, STORE_READINGS = 3, 3
"""Their medians count."""

STORE_TIMES = 8
"""As many tokens for a reading of the store, whose start and end weigh in a short one."""

ONCE = ("store_direct", "beside_writer")
"""Read in the first round alone, behind the store: they explain its figure."""

RATE_IN_FLIGHT = 64
RATES_S = {"cuda": 330.0, "cpu": 60.0}
"""What reading all rates takes; it is done in one go or not at all."""


def serve_stage(story: Story) -> None:
    """Answer, extract, verify, prove, detach."""
    if story.engine == "transformers":
        in_process(story)
        return
    steps = [name for name in STEPS if story.scale.rates or name != "serve.rates"]
    if any(story.figures(name) is None for name in steps):
        story.need(START_S, "starting servers")
        capture = {"capture": lambda: story.serve("capture", *story.scale.generate_flags, capture=True)}
        plain = {"plain": lambda: story.serve("plain", *story.scale.prefill_flags)}
        at_once = story.device == "cuda"  # elsewhere a second start would only take the first one's time
        starts = {**capture, **plain} if at_once else capture
        with together(starts, at_once=2, needed=("capture",), note=story.note) as urls:
            captured_and_proved(story, urls["capture"])
            if "serve.rates" in steps and story.figures("serve.rates") is None:
                with together({} if at_once else plain, at_once=1, note=story.note) as more:
                    beside = {**urls, **more}.get("plain")
                    if beside:
                        story.attempt(
                            "serve.rates", RATES_S[story.device], lambda: rates(story, urls["capture"], beside)
                        )
    story.attempt("serve.detach", 5, lambda: detach(story))


def captured_and_proved(story: Story, url: str) -> None:
    story.step("serve.generate", 20, lambda: generate(story, url))
    story.step("serve.extract", 15, lambda: extract(story, url))
    story.attempt("serve.verify", 15, lambda: trim(story.hsdump("verify", story.store, codes=(0, 1, 2))))
    story.attempt("serve.prove", 20, lambda: prove(story, story.store, url))
    story.attempt("serve.probe", 20, lambda: trim(story.hsdump("probe", "--server", url, codes=(0, 1, 2))))


def generate(story: Story, url: str) -> dict[str, Any]:
    """Have the target answer greedily, as the bench asks it."""
    scale = story.scale
    found = story.hsdump(
        *("generate", story.data / "learn.jsonl", "--server", url, "--out", story.answers, "--model", story.model),
        *("--temperature", "0", "--max-new-tokens", scale.new_tokens, "--concurrency", scale.in_flight),
        codes=(0, 3),
    )
    names = ("answers", "answer_tokens", "prompt_tokens", "finish", "failed", "seconds", "answer_tokens_per_s")
    return {name: found[name] for name in (*names, "samples", "left_out", "command_seconds")}


def token_rows(path: Path) -> Samples:
    """Give the tokens of every answer, prompt included."""
    rows = [row.value for row in read_rows(path) if not isinstance(row, Skip)]
    return [np.asarray(row["input_ids"], dtype=np.int64) for row in rows]


def joined(samples: Samples, length: int, tokens: int) -> Samples:
    """Join samples to rows of so many tokens, until there are so many tokens in all."""
    flat = np.concatenate(samples)[:tokens]
    whole = max(len(flat) // length, 1)
    return list(flat[: whole * length].reshape(whole, -1))


def rates(story: Story, url: str, plain: str) -> dict[str, Any]:
    """Read the rate of the same tokens: without capture, with it on, drained through shared memory, and to a store."""
    samples = token_rows(story.answers)
    random.Random(4).shuffle(samples)
    some = joined(samples, min(RATE_ROW, story.scale.positions - 16), RATE_TOKENS)
    flight = min(story.scale.in_flight, RATE_IN_FLIGHT)
    for one in (plain, url):  # kernels are compiled for lengths not seen before
        ordinary(one, some[: max(4, len(some) // 8)], at_once=flight)
    found: dict[str, list[float]] = {"plain": [], "capture_on": [], "drained": []}
    for _ in range(READINGS):
        found["plain"].append(ordinary(plain, some, at_once=flight).tokens_per_s)
        found["capture_on"].append(ordinary(url, some, at_once=flight).tokens_per_s)
        found["drained"].append(captured(url, some, at_once=flight).tokens_per_s)
    long = some + [row for number in range(STORE_TIMES - 1) for row in again(samples, number, some)]
    found |= store_rates(story, url, plain, long)
    middle = {name: round(median(values), 1) for name, values in found.items()}
    written = middle.pop("writer_bytes_per_s")
    return {
        "samples": len(some),
        "row_tokens": len(some[0]),
        "tokens": int(sum(map(len, some))),
        "readings": {name: [round(value, 1) for value in values] for name, values in found.items()},
        "writer_bytes_per_s": written,
        **{f"{name}_tokens_per_s": value for name, value in middle.items()},
        "capture_on_ratio": round(middle["capture_on"] / middle["plain"], 4),
        "drained_ratio": round(middle["drained"] / middle["plain"], 4),
        "store_tokens": int(sum(map(len, long))),
        "store_ratio": round(middle["store"] / middle["plain_long"], 4),
        "store_direct_ratio": round(middle["store_direct"] / middle["plain_long"], 4),
        "beside_writer_ratio": round(middle["beside_writer"] / middle["plain_long"], 4),
    }


def store_rates(story: Story, url: str, plain: str, rows: Samples) -> dict[str, list[float]]:
    """Read the rate without capture, to a committed store (through the page cache and past it), and without capture
    beside a process that only writes as many bytes a second to the same disk: what the writing alone costs.
    """
    flight = min(story.scale.in_flight, RATE_IN_FLIGHT)
    file = write_rows(story.work / "rates.jsonl", rows)
    extracted = story.figures("serve.extract") or {}
    token_bytes = extracted["state_bytes"] / extracted["tokens"]
    found: dict[str, list[float]] = {"plain_long": [], "store": [], "store_direct": [], "beside_writer": []}
    found["writer_bytes_per_s"] = []

    def beside_writer() -> float:
        with writing(story.work / "rates-written", found["store"][0] * token_bytes) as written:
            rate = ordinary(plain, rows, at_once=flight).tokens_per_s
        found["writer_bytes_per_s"].append(written.bytes_per_s)
        return rate

    readings: dict[str, Callable[[], float]] = {
        "plain_long": lambda: ordinary(plain, rows, at_once=flight).tokens_per_s,
        "store": lambda: stored_rate(story, url, file, flight),
        "store_direct": lambda: stored_rate(story, url, file, flight, "--direct"),
        "beside_writer": beside_writer,
    }
    for number in range(STORE_READINGS):  # there and back: a machine that becomes slower meets all of them alike
        for name in readings if number % 2 == 0 else reversed(readings):
            if number == 0 or name not in ONCE:
                found[name].append(readings[name]())
    return found


def again(samples: Samples, number: int, like: Samples) -> Samples:
    """Join samples anew, in another order: as many rows, no one of which begins as another does."""
    samples = list(samples)
    random.Random(5 + number).shuffle(samples)
    return joined(samples, len(like[0]), sum(map(len, like)))


def stored_rate(story: Story, url: str, rows: Path, flight: int, *more: str) -> float:
    """Extract rows to a committed store of their own, which is not kept; its tokens/s without the command's start."""
    out = afresh(story.work / "rates-store")
    words = ("extract", rows, "--server", url, "--out", out, "--model", story.model, "--no-probe")
    found = story.hsdump(*words, "--concurrency", flight, *more)
    afresh(out)
    return float(found["tokens_per_s"])


def extract(story: Story, url: str) -> dict[str, Any]:
    """Extract everything to a committed store."""
    words = ("extract", story.answers, "--server", url, "--out", story.store, "--model", story.model)
    found = story.hsdump(*words, "--concurrency", story.scale.in_flight, codes=(0, 3))
    names = ("committed", "already_committed", "failed", "skipped", "retries", "tokens", "state_bytes", "seconds")
    return {
        **{name: found[name] for name in (*names, "tokens_per_s", "command_seconds")},
        "gb_per_s": round(found["state_bytes"] / max(found["seconds"], 1e-9) / 1e9, 3),
        "store_bytes": sum(path.stat().st_size for path in story.store.rglob("*") if path.is_file()),
    }


def prove(story: Story, store: Path, url: str) -> dict[str, Any]:
    """Prove a store against the server; without its text where that alone is in the way.

    A target that trained for minutes says some words in other tokens than its tokenizer makes of them. They are what it
    said, and what its states are of.
    """
    words = ("prove", store, "--server", url, "--samples", story.scale.prove_samples, "--model", story.model)
    before = (story.figures("serve.prove") or {}).get("with_text")
    found = {} if before else trim(story.hsdump(*words, codes=(0, 1, 2)))
    if not before and not any(OTHER_TOKENS in word for word in found.get("words", [])):
        return found
    again = trim(story.hsdump(*words, "--no-text", codes=(0, 1, 2)))
    return {**again, "with_text": {"verdict": found["verdict"], "words": found["words"][:2]} if found else "not asked"}


def detach(story: Story) -> dict[str, Any]:
    """Leave nothing behind, and have it proved."""
    try:
        found = story.hsdump("detach", "--python", story.target.python)
    except StepFailed as error:  # told, and not in the way of the stages behind it
        lines = str(error).replace(str(story.work), "WORK").splitlines()
        found = {"verdict": "failed", "words": [line for line in lines[1:] if line.strip()][-4:]}
    return trim(found)


def trim(report: dict[str, Any]) -> dict[str, Any]:
    """Keep verdict, words and small numbers of a report."""
    keep: tuple[str, ...] = (
        "verdict",
        "exit_code",
        "words",
        "samples",
        "tokens",
        "command_seconds",
        "counts",
        "states",
        "engine_ids",
    )
    keep += ("wrong_share_below", "layers_read", "undone", "proofs", "of_samples", "engine")
    found = {name: report[name] for name in keep if name in report}
    if len(json.dumps(found.get("states", []))) > 6000:
        found.pop("states")
    return found


def in_process(story: Story) -> None:
    """Do the same without a server: answers and states by transformers, for machines that have no SGLang."""
    story.step("serve.generate", 10, lambda: answer_in_process(story))
    store = ("--engine", "transformers", "--model", story.model, "--out", story.store)
    words = ("extract", story.answers, *store)
    keep = ("committed", "failed", "tokens", "state_bytes", "seconds", "tokens_per_s", "command_seconds")
    story.step("serve.extract", 10, lambda: _pick(story.hsdump(*words), keep))
    story.step("serve.verify", 5, lambda: trim(story.hsdump("verify", story.store, codes=(0, 1, 2))))


def _pick(report: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: report[name] for name in names}


def answer_in_process(story: Story) -> dict[str, Any]:
    """Answer greedily with transformers."""
    import torch
    import transformers

    from hsdump.demo.questions import BATCH, answer
    from hsdump.draft.eval import read_prompts

    walks = read_prompts(story.data / "learn.jsonl", str(story.model), None)
    model = transformers.AutoModelForCausalLM.from_pretrained(story.model, dtype=torch.float32).eval()
    asked = sorted(((f"q{number}", one.prompt) for number, one in enumerate(walks)), key=lambda pair: len(pair[1]))
    with story.answers.open("w", encoding="utf-8") as file:
        tokens = 0
        for start in range(0, len(asked), BATCH):
            for row in answer(model, asked[start : start + BATCH], story.scale.new_tokens):
                file.write(json.dumps(row) + "\n")
                tokens += sum(row["loss_mask"])
    return {"answers": len(asked), "answer_tokens": tokens, "engine": f"transformers {transformers.__version__}"}
