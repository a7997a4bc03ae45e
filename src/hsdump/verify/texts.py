"""Are the store's tokens what the served model's own tokenizer and template make of their text?

States of wrong tokens are perfectly good states, so nothing but the tokens can show this.

Letters: S = tokens of one sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from hsdump.errors import InputError
from hsdump.prompts import PromptOptions, Renderer
from hsdump.prompts.conversation import Message
from hsdump.prompts.options import RowRefused

REWRITTEN, REWRITTEN_TOKENS = 0.03, 4
"""Share and number of a sample's tokens that come back otherwise. A model now and then cuts a word in another way than
its tokenizer would, which changes a token or two; tokens of another tokenizer make other text altogether."""

OFF_SHARE = 0.02
"""Share of samples that may be off."""

NEAR = 12
"""Tokens before a learned span in which the template's header must be found; thinking marks may stand between."""


class TextReport(msgspec.Struct, kw_only=True):
    """What tokens look like to the served model's tokenizer and template."""

    samples: int = 0
    rewritten: int = 0
    """Samples whose text this tokenizer would write otherwise."""

    spans: int = 0
    """Learned spans with something before them."""

    headless: int = 0
    """Of those, not preceded by the template's header of an answer."""

    first_off: str | None = None
    digests: list[str] = []
    """Tokenizer or template of another digest than the store's."""

    unknown: str | None = None
    """Why nothing can be said."""

    @property
    def problems(self) -> list[str]:
        """Say what is wrong, in sentences."""
        found = []
        if self.rewritten > OFF_SHARE * self.samples:
            found.append(
                f"{self.rewritten} of {self.samples} samples are other tokens than the served tokenizer makes of their "
                f"text, such as {self.first_off}: another tokenizer, or no text at all (then use --no-text)"
            )
        elif self.headless > OFF_SHARE * max(self.spans, 1):
            found.append(
                f"{self.headless} of {self.spans} learned spans do not follow the served template's header of an "
                f"answer, such as in {self.first_off}: another chat template"
            )
        return found


@dataclass(kw_only=True)
class TextChecker:
    """The served model's tokenizer and template, as the server's own folder has them."""

    renderer: Renderer
    header: tuple[int, ...]
    """Tokens that the template writes before an answer; empty without a template."""

    @classmethod
    def load(cls, model: str, chat_template: str | None) -> TextChecker:
        """Read them.

        Args:
            chat_template: the text of the server's own `--chat-template`.

        Raises:
            InputError: no tokenizer can be read there.
        """
        renderer = Renderer.load(model, PromptOptions(chat_template=chat_template))
        return cls(renderer=renderer, header=_header(renderer))

    def check(self, samples: Sequence[tuple[str, NDArray[np.int64], NDArray[np.uint8]]]) -> TextReport:
        """Look at samples (key, input_ids [S], loss_mask [S])."""
        report = TextReport()
        for key, ids, mask in samples:
            report.samples += 1
            spans, headless = self._spans(ids, mask)
            report.spans += spans
            report.headless += headless
            changed = self._rewritten(ids)
            rewritten = changed >= max(REWRITTEN_TOKENS, REWRITTEN * len(ids))
            report.rewritten += rewritten
            if (rewritten or headless) and report.first_off is None:
                report.first_off = key
        return report

    def _rewritten(self, ids: NDArray[np.int64]) -> int:
        """Count the tokens that decoding and encoding does not bring back."""
        try:
            again, _ = self.renderer.tokens.encode(self.renderer.tokens.decode(ids.tolist()), add_special_tokens=False)
        except (RowRefused, InputError):
            return len(ids)
        return (Counter(ids.tolist()) - Counter(again.tolist())).total()

    def _spans(self, ids: NDArray[np.int64], mask: NDArray[np.uint8]) -> tuple[int, int]:
        """Count learned spans behind something, and those without the header before them."""
        if not self.header:
            return 0, 0
        starts = np.flatnonzero((mask[1:] == 1) & (mask[:-1] == 0)) + 1
        size = len(self.header)
        headless = 0
        for start in starts:
            window = ids[max(0, start - size - NEAR) : start].tolist()
            headless += not any(tuple(window[at : at + size]) == self.header for at in range(len(window)))
        return len(starts), headless


def _header(renderer: Renderer) -> tuple[int, ...]:
    """Find the tokens that stand between any question and its answer, from the last control token on."""
    try:
        asked = [renderer.ask([Message(role="user", content=text)]).input_ids.tolist() for text in ("1", "no, he said")]
    except (RowRefused, InputError):
        return ()
    one, other = (np.array(ids[::-1]) for ids in asked)
    shorter = min(len(one), len(other))
    common = one[: _equal_lead(one[:shorter], other[:shorter])][::-1].tolist()
    marks = [at for at, token in enumerate(common) if token in renderer.tokens.special]
    # Without control tokens the first of them may be glued to the question's end.
    return tuple(common[marks[-1] :] if marks else common[1:])


def _equal_lead(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    different = np.flatnonzero(one != other)
    return int(different[0]) if len(different) else len(one)
