"""A sample as a person can check it: loss tokens coloured, special tokens visible, token borders kept."""

from __future__ import annotations

from rich.text import Text

from hsdump.prompts.tokens import Tokens
from hsdump.samples import TokenSample

_LEARNED, _SPECIAL, _PLAIN = "bold green", "magenta", "dim"


def show_sample(sample: TokenSample, tokens: Tokens) -> Text:
    """Colour one sample.

    Args:
        sample: tokens and mask.
        tokens: the tokenizer that made the ids.
    """
    special = tokens.special
    text = Text()
    learned = int(sample.loss_mask.sum())
    text.append(f"{sample.source}  {len(sample.input_ids)} tokens, {learned} learned\n", style="bold")
    start = 0
    ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
    for end in range(1, len(ids) + 1):
        # Runs of one kind are decoded together: a character may be several byte tokens.
        if end < len(ids) and (mask[end], ids[end] in special) == (mask[start], ids[start] in special):
            continue
        part = tokens.decode(ids[start:end])
        style = _LEARNED if mask[start] else _PLAIN
        if ids[start] in special:
            style = f"{style} {_SPECIAL}" if mask[start] else _SPECIAL
        text.append(part, style=style)
        start = end
    text.append("\n")
    return text
