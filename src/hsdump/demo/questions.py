"""The demo's questions and the target's own answers to them, as exact tokens.

    python -m hsdump.demo.questions TARGET OUT --learn 1000 --test 16

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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from hsdump.demo.train_target import Exchange, exchanges, library_files

LONGEST_QUESTION = 144
SHORTEST_QUESTION = 16
SHORTEST_ANSWER = 8
"""Tokens. A third of the questions is answered with nothing but the end, from which nothing can be learned."""

BATCH = 128
ROUND = 256
"""Most questions that are answered before it is seen whether more are needed."""

SIDE_BY_SIDE = 2
"""Batches at a time: the matrices are small, and two cores do more on one each than on one together."""

Asked = tuple[Exchange, list[int], list[int]]
"""A question, its tokens, and those of the answer."""


def write_questions(target: Path, out: Path, *, learn: int, test: int, new_tokens: int, unseen: bool = False) -> None:
    """Write `answers.jsonl` (tokens and loss masks to learn from) and `test.jsonl` (questions) into a folder.

    No question to test with is learned from, not under another name either.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hsdump.demo.answering import Answerer

    torch.set_num_threads(max(1, torch.get_num_threads() // SIDE_BY_SIDE))
    tokenizer = AutoTokenizer.from_pretrained(target)
    answerer = Answerer(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval())
    seen = _asked(answerer, _choose(tokenizer, held_out=False), learn + (0 if unseen else test), new_tokens)
    tested = _asked(answerer, _choose(tokenizer, held_out=True), test, new_tokens) if unseen else seen[:test]
    known = {tuple(ids) for _, ids, _ in tested}
    rows = [
        {"id": exchange.source, "input_ids": ids + said, "loss_mask": [0] * len(ids) + [1] * len(said)}
        for exchange, ids, said in seen
        if tuple(ids) not in known
    ]
    _write(out / "answers.jsonl", rows)
    _write(
        out / "test.jsonl",
        [
            {
                "id": exchange.source,
                "category": "docstring" if '"""' in exchange.head else "code",
                "messages": [{"role": "user", "content": exchange.head}],
            }
            for exchange, _, _ in tested
        ],
    )


def _asked(answerer: Any, questions: list[tuple[Exchange, list[int]]], number: int, new_tokens: int) -> list[Asked]:
    """Ask until there are so many answers, or no more questions; in the order of the questions."""
    found: list[Asked] = []
    start = 0
    while start < len(questions) and len(found) < number:
        part = questions[start : start + min(ROUND, 2 * (number - len(found)))]
        start += len(part)
        by_length = sorted(range(len(part)), key=lambda place: len(part[place][1]))  # little to fill up in a batch
        said: dict[int, list[int]] = {}
        size = min(BATCH, -(-len(part) // SIDE_BY_SIDE))
        batches = [by_length[first : first + size] for first in range(0, len(part), size)]
        asked = [[part[place][1] for place in places] for places in batches]
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            answered = pool.map(partial(answerer.answer, new_tokens=new_tokens), asked)
            for places, answers in zip(batches, answered, strict=True):
                said |= dict(zip(places, answers, strict=True))
        found += [(*part[place], said[place]) for place in range(len(part)) if len(said[place]) >= SHORTEST_ANSWER]
    return found[:number]


def _choose(tokenizer: Any, *, held_out: bool) -> list[tuple[Exchange, list[int]]]:
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
    parser.add_argument("--learn", type=int, default=1000, help="answers to learn from")
    parser.add_argument("--test", type=int, default=16, help="questions to test with")
    parser.add_argument("--new-tokens", type=int, default=128, help="longest answer")
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
