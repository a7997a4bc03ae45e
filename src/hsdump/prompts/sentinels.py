"""Sentinels: one private character at each end of every visible piece of text, put in before rendering, found after.

Which pieces get them is a matter of the style, because templates ask questions of the text: `every` piece, also an
empty reply; only `filled` pieces (for "if content"); `inner` third of text that is not the assistant's (for
"content.startswith(...)").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hsdump.prompts.conversation import THINK_CLOSE, THINK_OPEN
from hsdump.prompts.options import RowRefused

STYLES = ("every", "filled", "inner")
"""In the order in which they are worth trying."""

THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Message keys under which templates look for reasoning."""

_PLANES = (0xF0000, 0x100000)
"""First code points of the two private planes: no language, no case, no whitespace, never normalised."""

_PLANE_SIZE = 0xFFFE
_MIN_INNER_CHARS = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A pair of sentinels around one piece of one message."""

    message: int
    opening: str
    closing: str
    kind: Literal["content", "thinking", "call"]
    core: str
    """The text between the sentinels."""

    lead: str = ""
    """Whitespace of the piece before the opening sentinel."""

    trail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Marked:
    """A rendering with its sentinels taken out and their places remembered."""

    text: str
    places: dict[str, int]
    """Sentinel to position in `text`."""


def take_out(text: str, marks: Sequence[Mark]) -> Marked:
    """Remove sentinels from a rendering and remember where they stood."""
    found: list[tuple[int, str]] = []
    at = 0
    for mark in marks:
        for sentinel in (mark.opening, mark.closing):
            # Nearly always in order, so the search goes on from the last place.
            place = text.find(sentinel, at)
            if place < 0:
                place = text.find(sentinel)
            if place >= 0:
                found.append((place, sentinel))
                at = place
        if mark.kind == "call" and mark.closing in text[at + 1 :]:
            # Some templates name the called function again in the result's header; only the first is the call.
            head, rest = text[: at + 1], text[at + 1 :]
            text = head + rest.replace(mark.opening, "").replace(mark.closing, "")
    found.sort()
    pieces, places, start = [], {}, 0
    for count, (place, sentinel) in enumerate(found):
        pieces.append(text[start:place])
        places[sentinel] = place - count
        start = place + 1
    pieces.append(text[start:])
    return Marked(text="".join(pieces), places=places)


def mark_messages(
    messages: Sequence[Mapping[str, Any]], text: str, style: str
) -> tuple[list[dict[str, Any]], list[Mark]]:
    """Copy messages with a pair of sentinels in every piece of text."""
    plane = next((plane for plane in _PLANES if max(text, default="") < chr(plane)), None)
    if plane is None:
        plane = next((plane for plane in _PLANES if not any(_in_plane(plane, char) for char in set(text))), None)
    if plane is None:
        raise RowRefused("mask-not-provable", "the text uses characters of both private planes")
    pen = _Pen(plane=plane, blanks=style == "every")
    out = []
    for index, message in enumerate(messages):
        copy = dict(message)
        for key in THINKING_KEYS:
            if isinstance(copy.get(key), str):
                copy[key] = pen.wrap(copy[key], index, "thinking")
        content = copy["content"] or ""
        if copy["content"] is None:
            pass  # a call without text, where the template tells null from empty
        elif message["role"] == "assistant":
            copy["content"] = _wrap_reply(pen, content, index, alone=not copy.get("tool_calls"))
        elif style == "inner":
            third = len(content) // 3 if len(content) >= _MIN_INNER_CHARS else len(content)
            inner = pen.wrap(content[third : 2 * third], index, "content")
            copy["content"] = content[:third] + inner + content[2 * third :]
        else:
            copy["content"] = pen.wrap(content, index, "content")
        if copy.get("tool_calls"):
            copy["tool_calls"] = [_wrap_call(pen, call, index) for call in copy["tool_calls"]]
        out.append(copy)
    return out, pen.marks


@dataclass(kw_only=True, slots=True)
class _Pen:
    """Hands out sentinels, two for each piece."""

    plane: int
    blanks: bool
    marks: list[Mark] = field(default_factory=list)

    def wrap(self, piece: str, index: int, kind: Literal["content", "thinking", "call"], *, blank: bool = False) -> str:
        """Put sentinels at the ends of the visible text; `blank` pieces get them, too, where there is none."""
        core = piece.strip()
        number = 2 * len(self.marks)
        if not (core or blank):
            return piece
        if number + 4 >= _PLANE_SIZE:
            raise RowRefused("mask-not-provable", f"more than {number // 2} pieces of text")
        at = piece.find(core) if core else len(piece)
        mark = Mark(
            message=index,
            opening=chr(self.plane + number),
            closing=chr(self.plane + number + 1),
            kind=kind,
            core=core,
            lead=piece[:at] if core else "",
            trail=piece[at + len(core) :],
        )
        self.marks.append(mark)
        return f"{piece[:at]}{mark.opening}{core}{mark.closing}{mark.trail}"


def _wrap_reply(pen: _Pen, content: str, index: int, *, alone: bool) -> str:
    """Mark the pieces between think marks apart, so that a template can drop or move each as before."""
    before, close, after = content.rpartition(THINK_CLOSE)
    if not close:
        lead, opened, rest = content.partition(THINK_OPEN)
        if opened and not lead.strip():
            return lead + opened + pen.wrap(rest, index, "content")
        return pen.wrap(content, index, "content", blank=alone and pen.blanks and not content.strip())
    lead, opened, thinking = before.rpartition(THINK_OPEN)
    lead = pen.wrap(lead, index, "content")
    thinking = pen.wrap(thinking, index, "thinking")
    return f"{lead}{opened}{thinking}{close}{pen.wrap(after, index, 'content')}"


def _wrap_call(pen: _Pen, call: Mapping[str, Any], index: int) -> dict[str, Any]:
    function = dict(call["function"])
    function["name"] = pen.wrap(function["name"], index, "call")
    return {**call, "function": function}


def _in_plane(plane: int, char: str) -> bool:
    return plane <= ord(char) < plane + 0x10000


def user_sentinels(mark: Mark) -> tuple[str, str]:
    """Give two more sentinels of the plane that `mark` is from, for a turn that is only tried out."""
    plane = ord(mark.opening) & ~0xFFFF
    return chr(plane + _PLANE_SIZE - 1), chr(plane + _PLANE_SIZE - 2)
