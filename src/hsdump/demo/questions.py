"""The demo's questions and the target's own answers to them, as exact tokens.

    python -m hsdump.demo.questions TARGET OUT --learn 320 --test 24

A question is the beginning of a function of Python's standard library; the target goes on. Those to test with are none
of those that the drafter learns from. A drafter learns from what the target says itself, not from what somebody else
wrote, so the answers are the target's greedy ones. With `--unseen` the questions to test with come from files that the
target never saw either: harder, because it is less sure of what it says.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hsdump.demo.train_target import Exchange, exchanges, library_files

LONGEST_QUESTION = 160
SHORTEST_QUESTION = 16
"""Tokens."""

BATCH = 32


def write_questions(target: Path, out: Path, *, learn: int, test: int, new_tokens: int, unseen: bool = False) -> None:
    """Write `answers.jsonl` (tokens and loss masks to learn from) and `test.jsonl` (questions) into a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    pool = _choose(tokenizer, held_out=False, number=learn + test)
    asked, questions = pool[:learn], pool[learn:]
    if unseen:
        questions = _choose(tokenizer, held_out=True, number=test)
    rows: list[dict[str, Any]] = []
    by_length = sorted(asked, key=lambda pair: len(pair[1]))  # little padding in a batch
    for start in range(0, len(by_length), BATCH):
        batch = [(exchange.source, ids) for exchange, ids in by_length[start : start + BATCH]]
        rows += answer(model, batch, new_tokens)
    _write(out / "answers.jsonl", rows)
    _write(
        out / "test.jsonl",
        [
            {
                "id": exchange.source,
                "category": "docstring" if '"""' in exchange.head else "code",
                "messages": [{"role": "user", "content": exchange.head}],
            }
            for exchange, _ in questions
        ],
    )


def _choose(tokenizer: Any, *, held_out: bool, number: int) -> list[tuple[Exchange, list[int]]]:
    found = list(exchanges(library_files(held_out=held_out), seed=1))
    random.Random(2).shuffle(found)  # noqa: S311  # an order, not a secret
    chosen: list[tuple[Exchange, list[int]]] = []
    for exchange in found:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": exchange.head}], add_generation_prompt=True, tokenize=False
        )
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if SHORTEST_QUESTION <= len(ids) <= LONGEST_QUESTION:
            chosen.append((exchange, ids))
        if len(chosen) == number:
            break
    return chosen


def answer(model: Any, asked: Sequence[tuple[str, list[int]]], new_tokens: int) -> list[dict[str, Any]]:
    """Answer a batch greedily, each question with its name; they are padded on the left."""
    import torch

    longest = max(len(ids) for _, ids in asked)
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for _, ids in asked])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for _, ids in asked])
    with torch.inference_mode():
        said = model.generate(padded, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)[
            :, longest:
        ].tolist()
    stop = model.config.eos_token_id
    rows = []
    for (name, ids), words in zip(asked, said, strict=True):
        kept = words[: words.index(stop) + 1] if stop in words else words
        rows.append(
            {
                "id": name,
                "input_ids": ids + kept,
                "loss_mask": [0] * len(ids) + [1] * len(kept),
            }
        )
    return rows


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write both files, as named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m hsdump.demo.questions")
    parser.add_argument("target", type=Path, help="the target's folder")
    parser.add_argument("out", type=Path, help="folder to write into")
    parser.add_argument("--learn", type=int, default=320)
    parser.add_argument("--test", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=80)
    parser.add_argument("--unseen", action="store_true", help="test with files that the target never saw")
    options = parser.parse_args()
    write_questions(
        options.target,
        options.out,
        learn=options.learn,
        test=options.test,
        new_tokens=options.new_tokens,
        unseen=options.unseen,
    )


if __name__ == "__main__":
    main()
