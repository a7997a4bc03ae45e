"""Conversations a second, against the way that is common in the field.

    python benchmarks/prompts/prepare_speed.py --model MODEL [--conversations 2000] [--workers 2]

The common way: for every assistant turn, `apply_chat_template` of the messages before it and of the messages up to it,
both tokenized, and the difference of the lengths is the mask. Both ways get the same conversations and the same
template, one after the other, three rounds each, best round counted. The common way's masks are compared with the
proved ones, because speed means little for masks that are off.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoTokenizer

from hsdump.prompts import PromptOptions, Renderer, read_samples
from hsdump.samples import TokenSample

ROUNDS = 3
TEXT = (
    "the sea is blue because water takes red light while a river carries sand and stones over many years "
    "def add ( a , b ) : return a + b Oslo liegt am Fjord 你好 世界 Привет мир 42 3.14 therefore however"
)
WORDS = TEXT.split()


def conversations(count: int, seed: int = 7) -> list[list[dict[str, str]]]:
    """Make chats of one to five exchanges, replies of 5 to 300 words."""
    draw = random.Random(seed)

    def text(low: int, high: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(low, high)))

    out = []
    for number in range(count):
        messages = [{"role": "system", "content": text(3, 30)}] if draw.random() < 0.3 else []
        for _ in range(draw.randint(1, 5)):
            messages.append({"role": "user", "content": f"{number} {text(3, 60)}"})
            messages.append({"role": "assistant", "content": text(5, 300)})
        out.append(messages)
    return out


def prefix_masks(tokenizer: Any, chats: list[list[dict[str, str]]]) -> list[tuple[list[int], list[int]]]:
    """Do it the common way."""
    out = []
    for messages in chats:
        ids = _ids(tokenizer, messages, generation_prompt=False)
        mask = [0] * len(ids)
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                start = len(_ids(tokenizer, messages[:index], generation_prompt=True))
                end = len(_ids(tokenizer, messages[: index + 1], generation_prompt=False))
                mask[start:end] = [1] * len(mask[start:end])
        out.append((ids, mask))
    return out


def _ids(tokenizer: Any, messages: list[dict[str, str]], *, generation_prompt: bool) -> list[int]:
    encoded = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=generation_prompt, return_dict=True
    )
    return list(encoded["input_ids"])


def best_of(rounds: int, work: Callable[[], Any]) -> tuple[float, Any]:
    """Give the shortest time and the last result."""
    best, result = float("inf"), None
    for _ in range(rounds):
        begin = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - begin)
    return best, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True)
    parser.add_argument("--chat-template", type=Path)
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    template = arguments.chat_template.read_text(encoding="utf-8") if arguments.chat_template else None
    options = PromptOptions(max_tokens=1 << 20, chat_template=template)
    renderer = Renderer.load(arguments.model, options)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokenizer.chat_template = template or tokenizer.chat_template
    chats = conversations(arguments.conversations)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chats.jsonl"
        path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")

        def ours() -> list[TokenSample]:
            items = read_samples([path], renderer, options, workers=arguments.workers)
            return [item for item in items if isinstance(item, TokenSample)]

        seconds, samples = best_of(ROUNDS, ours)
    peer_seconds, peer = best_of(ROUNDS, lambda: prefix_masks(tokenizer, chats))
    tokens = sum(len(sample.input_ids) for sample in samples)
    same_ids = sum(sample.input_ids.tolist() == ids for sample, (ids, _) in zip(samples, peer, strict=True))
    extra = sum(
        sum(theirs > mine for mine, theirs in zip(sample.loss_mask.tolist(), mask, strict=True))
        for sample, (ids, mask) in zip(samples, peer, strict=True)
        if sample.input_ids.tolist() == ids
    )
    report = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "template": arguments.chat_template.name if arguments.chat_template else "the model's own",
        "conversations": len(chats),
        "tokens": tokens,
        "workers": arguments.workers,
        "hsdump_conversations_per_s": round(len(samples) / seconds, 1),
        "hsdump_tokens_per_s": round(tokens / seconds),
        "prefix_way_conversations_per_s": round(len(chats) / peer_seconds, 1),
        "prefix_way_tokens_per_s": round(tokens / peer_seconds),
        "speedup": round(peer_seconds / seconds, 2),
        "conversations_with_equal_ids": same_ids,
        "tokens_that_only_the_prefix_way_learns": extra,
        "loss_tokens": int(sum(int(sample.loss_mask.sum()) for sample in samples)),
    }
    text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
