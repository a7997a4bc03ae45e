"""Chats that somebody rendered already: taken apart with the template's own words, and proved by rendering again.

The words between turns are learned from the template (two exchanges with sentinel text). A text is cut at them, and
the turns that come out are rendered: unless everything from the first user turn on comes out byte for byte the same,
the text is not a chat of this template, and no mask is guessed for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from hsdump.prompts.masks import Layout, MaskFinder
from hsdump.prompts.options import RowRefused

_TEXTS = ("hsdumpuserone", "hsdumpreplyone", "hsdumpusertwo", "hsdumpreplytwo")


@dataclass(frozen=True, kw_only=True)
class ChatText:
    """The fixed words of one template."""

    finder: MaskFinder

    @cached_property
    def _words(self) -> tuple[str, str, str, str]:
        """(what a user turn opens with, user to assistant, assistant to user, what ends the text)."""
        roles = ("user", "assistant")
        messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(_TEXTS)]
        layout = self.finder.layout(messages)
        at = [layout.text.find(text) for text in _TEXTS]
        if sorted(at) != at or at[0] < 0:
            raise RowRefused("mask-not-provable", "the template does not keep plain turns in order")
        ends = [place + len(text) for place, text in zip(at, _TEXTS, strict=True)]
        to_user = layout.text[ends[1] : at[2]]
        opening = layout.text[layout.turns[0].end : at[2]].lstrip()
        return opening, layout.text[ends[0] : at[1]], to_user, layout.text[ends[3] :]

    def layout(self, text: str) -> Layout:
        """Find the assistant turns of a rendered chat.

        Raises:
            RowRefused: rendering what was found does not give this text back.
        """
        opening, to_assistant, to_user, end = self._words
        begin = text.find(opening)
        if begin < 0 or not opening or not to_assistant or not to_user:
            raise _unproved("no user turn of this template begins in it")
        body = text[begin + len(opening) :]
        messages = []
        rest = body
        while rest:
            user, found, rest = rest.partition(to_assistant)
            if not found:
                raise _unproved("it does not end with a turn of the assistant")
            reply, more, after = rest.partition(to_user)
            if not more:
                reply = reply.removesuffix(end) if reply.endswith(end) else reply.removesuffix(end.rstrip())
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
            rest = after
        layout = self.finder.layout(messages)
        start = layout.text.find(opening + body.rstrip())
        shift = begin - start
        if start < 0 or layout.text[start:].rstrip() != text[begin:].rstrip():
            raise _unproved("rendering its turns again gives another text")
        # What the template writes before the first user turn may differ (no default system text, say): it is context.
        turns = tuple(
            replace(turn, start=turn.start + shift, end=min(turn.end + shift, len(text))) for turn in layout.turns
        )
        return replace(layout, text=text, turns=turns)


def _unproved(why: str) -> RowRefused:
    return RowRefused(
        "mask-not-provable",
        f"the row is text, and not provably a chat of this template: {why}; --text all learns all of it",
    )
