"""A sample as a person can check it: loss tokens coloured, special tokens visible."""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text

from hsdump.prompts.tokens import Tokens
from hsdump.samples import TokenSample

_LEARNED, _SPECIAL, _PLAIN = "bold green", "magenta", "dim"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Consecutive tokens of one kind, as text."""

    text: str
    learned: bool
    special: bool


def runs_of(sample: TokenSample, tokens: Tokens) -> list[Run]:
    """Cut a sample where its mask, or its being a control token, changes.

    A run is decoded together, because a character may be several byte tokens.
    """
    ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
    kinds = [(bool(learn), number in tokens.special) for number, learn in zip(ids, mask, strict=True)]
    runs, start = [], 0
    for end in range(1, len(ids) + 1):
        if end < len(ids) and kinds[end] == kinds[start]:
            continue
        learned, special = kinds[start]
        runs.append(Run(text=tokens.decode(ids[start:end]), learned=learned, special=special))
        start = end
    return runs


def show_sample(sample: TokenSample, tokens: Tokens) -> Text:
    """Colour one sample for the terminal."""
    learned = int(sample.loss_mask.sum())
    text = Text()
    text.append(f"{sample.source}  {len(sample.input_ids)} tokens, {learned} learned\n", style="bold")
    for run in runs_of(sample, tokens):
        style = _LEARNED if run.learned else _PLAIN
        if run.special:
            style = f"{_LEARNED} {_SPECIAL}" if run.learned else _SPECIAL
        text.append(run.text, style=style)
    return text.append("\n")
