"""Answers to samples: which tokens are learned follows from who wrote them, so nothing has to be found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsdump.generate.journal import Answer, Journal
from hsdump.generate.options import GenerateOptions
from hsdump.generate.state import GenerateState
from hsdump.prompts.samples_file import writing_samples
from hsdump.samples import TokenSample

STRATEGY = "generated"
"""In the column `mask` of a samples file: every learned token was sampled by the target."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Part:
    """Tokens of one or more turns of which each begins with all of the one before."""

    last_turn: int
    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.uint8]


def samples_of(source: str, answers: Sequence[Answer]) -> list[TokenSample]:
    """Make the samples of one conversation.

    A later turn is joined to the earlier ones where its prompt begins with exactly their tokens. Where it does not (the
    template strips earlier thinking, or the text of an answer has another tokenization than the one that was sampled),
    it is a sample of its own, with the earlier answers as context. So each answer is learned once, in the tokens and
    behind the context that the target had.

    Args:
        source: for people.
        answers: of one conversation, in order.
    """
    parts: list[_Part] = []
    for turn, answer in enumerate(answers):
        prompt, output = answer.prompt_ids.astype(np.int64), answer.output_ids.astype(np.int64)
        mask = np.zeros(len(prompt) + len(output), dtype=np.uint8)
        mask[len(prompt) :] = 1
        if parts and np.array_equal(prompt[: len(parts[-1].input_ids)], parts[-1].input_ids):
            before = parts.pop().loss_mask
            mask[: len(before)] = before
        parts.append(_Part(last_turn=turn, input_ids=np.concatenate([prompt, output]), loss_mask=mask))
    names = [*(f"{source}#turn{part.last_turn}" for part in parts[:-1]), source]
    return [TokenSample.make(name, part.input_ids, part.loss_mask) for name, part in zip(names, parts, strict=False)]


def write_samples(journal: Journal, options: GenerateOptions, settings: dict[str, Any], state: GenerateState) -> None:
    """Write the samples file from what was answered, in the order of the input; no file when there is nothing.

    Raises:
        UsageError: the folder cannot be written.
    """
    samples = _samples(journal, options, state)
    first = next(samples, None)
    if first is None:
        return
    with writing_samples(options.out, settings) as file:
        file.append(first, STRATEGY)
        for sample in samples:
            file.append(sample, STRATEGY)


def _samples(journal: Journal, options: GenerateOptions, state: GenerateState) -> Iterator[TokenSample]:
    seen: set[bytes] = set()
    for source, number, answers in journal.conversations(options.num_answers):
        wanted = [answer for answer in answers if options.cut == "keep" or answer.finish != "length"]
        state.samples["cut-dropped"] += len(answers) - len(wanted)
        name = source if options.num_answers == 1 else f"{source}#answer{number}"
        made = samples_of(name, wanted)
        state.notes["conversations-cut-at-turns"] += len(made) > 1
        for sample in made:
            key = bytes.fromhex(sample.key)
            if key in seen:
                state.samples["duplicate"] += 1  # the target gave the same answer twice
                continue
            seen.add(key)
            state.samples["samples"] += 1
            state.samples["tokens"] += len(sample.input_ids)
            state.samples["loss_tokens"] += int(sample.loss_mask.sum())
            yield sample
