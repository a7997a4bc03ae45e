"""Which characters of a rendered conversation are the assistant's own: found by proof, or refused.

Letters: none, everything here is text.

The proof. Every turn's text gets two sentinels, one at each end of its visible part, so that trimming, splitting at
think marks and conditions on emptiness behave as before. The template renders the marked conversation, too. If taking
the sentinels out gives the plain rendering back, byte for byte, then the sentinels show where the template put each
turn. Where a turn begins (after its header) and ends (after its end token) is found by comparing the text between
two turns with the generation prompt, and with a conversation that ends there. No text is ever searched for a role
header, so a header that a user typed changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hsdump.prompts.conversation import THINK_CLOSE, THINK_OPEN
from hsdump.prompts.options import RowRefused
from hsdump.prompts.template import Template

Strategy = Literal["generation", "sentinel", "prefix", "all"]

_PLANES = (0xF0000, 0x100000)
"""First code points of the two private planes: no language, no case, no whitespace, never normalised."""

_PLANE_SIZE = 0xFFFE
_MIN_INNER_CHARS = 48
_STYLES = ("every", "filled", "inner")
"""How sentinels are placed, tried in this order, because templates ask questions of the text: `every` piece, also an
empty reply; only `filled` pieces (for "if content"); `inner` third of text that is not the assistant's (for
"content.startswith(...)")."""

_TEXT_KEYS = ("content", "reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnSpan:
    """One assistant turn in the rendered text."""

    message: int
    start: int
    end: int

    thinking_kept: bool
    """False when the turn has thinking in the data and the template did not show it."""

    calls_kept: bool
    """False when the template left out a tool call."""

    altered: bool
    """True when the template changed text that it did show, or left a part out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A rendered conversation and its assistant turns, in order."""

    text: str
    turns: tuple[TurnSpan, ...]
    strategy: Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
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


@dataclass(kw_only=True, slots=True)
class _Marked:
    """A rendering with its sentinels taken out and their places remembered."""

    text: str
    places: dict[str, int]
    """Sentinel to position in `text`."""


@dataclass(kw_only=True, slots=True)
class MaskFinder:
    """Finds layouts under one template. Keeps what it learned about fixed text between turns."""

    template: Template
    control_tokens: Sequence[str]
    """Texts of the tokenizer's added tokens: a boundary never falls inside one."""

    _ends: dict[tuple[str, str], int] = field(default_factory=dict)

    def layout(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Layout:
        """Render a conversation and find its assistant turns.

        Raises:
            RowRefused: `template-rejected`, or `mask-not-provable` when no strategy holds for this conversation.
        """
        if self.template.has_generation_spans:
            text, spans = self.template.render_spans(messages, tools)
        else:
            text, spans = self.template.render(messages, tools), []
        why = ""
        for style in _STYLES:
            try:
                turns = self._sentinel_turns(messages, tools, text, _mark(messages, text, style))
            except _NoProof as no_proof:
                why = why or str(no_proof)
                continue
            if spans:
                return Layout(text=text, turns=self._generation_turns(text, spans, turns), strategy="generation")
            return Layout(text=text, turns=turns, strategy="sentinel")
        return Layout(text=text, turns=self._prefix_turns(messages, tools, text, why), strategy="prefix")

    def _sentinel_turns(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        text: str,
        marked: tuple[list[dict[str, Any]], list[_Mark]],
    ) -> tuple[TurnSpan, ...]:
        marked_messages, marks = marked
        full = self._take_out(marked_messages, marks, tools)
        if full is None or full.text != text:
            raise _NoProof("the template renders marked text differently")
        view = _View(finder=self, messages=messages, marked=marked_messages, marks=marks, tools=tools, full=full)
        turns = tuple(view.turn(index) for index, message in enumerate(messages) if message["role"] == "assistant")
        _check_tiles(turns, marks, full)
        return turns

    def _take_out(
        self,
        marked: Sequence[Mapping[str, Any]],
        marks: Sequence[_Mark],
        tools: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool = False,
    ) -> _Marked | None:
        """Render marked messages and remove the sentinels; None when the template refuses them."""
        try:
            text = self.template.render(marked, tools, generation_prompt=generation_prompt)
        except RowRefused:
            return None
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
        return _Marked(text="".join(pieces), places=places)

    def _generation_turns(
        self, text: str, spans: list[tuple[int, int]], turns: tuple[TurnSpan, ...]
    ) -> tuple[TurnSpan, ...]:
        """Take the template's own ranges, and insist that each holds exactly the turn that sentinels show."""
        if len(spans) != len(turns):
            raise RowRefused(
                "mask-not-provable",
                f"the template marks {len(spans)} generation blocks for {len(turns)} assistant turns",
            )
        out = []
        for (start, end), turn in zip(spans, turns, strict=True):
            if not start <= turn.start <= turn.end <= end:
                raise RowRefused(
                    "mask-not-provable",
                    f"generation block {start}..{end} does not hold assistant turn {turn.start}..{turn.end}",
                )
            # Line breaks after the end token are the template's: the model stops before them.
            tail = text[turn.end : end]
            stop = end if tail.strip() else turn.end
            out.append(replace(turn, start=start, end=stop))
        return tuple(out)

    def _prefix_turns(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        text: str,
        why: str,
    ) -> tuple[TurnSpan, ...]:
        """Take prefix differences, each prefix proved to be one for this conversation."""
        turns = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            try:
                before = self.template.render(messages[:index], tools, generation_prompt=True)
                after = self.template.render(messages[: index + 1], tools)
            except RowRefused as refused:
                raise RowRefused("mask-not-provable", f"{why}; {refused.detail}") from refused
            if not (text.startswith(after) and after.startswith(before)):
                detail = f"{why}; and message {index} ends no prefix of the conversation"
                raise RowRefused("mask-not-provable", detail)
            content = str(message.get("content") or "")
            thinking = _thinking_of(message).strip()
            end = len(after.rstrip()) if content == content.rstrip() else len(after)
            turns.append(
                TurnSpan(
                    message=index,
                    start=len(before),
                    end=max(end, len(before)),
                    thinking_kept=thinking in after,
                    calls_kept=all(call["function"]["name"] in after for call in message.get("tool_calls") or ()),
                    altered=content not in after,
                )
            )
        return tuple(turns)


class _NoProof(Exception):
    """Sentinels do not show where the turns are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _View:
    """One marked conversation while its turns are being found."""

    finder: MaskFinder
    messages: Sequence[Mapping[str, Any]]
    marked: list[dict[str, Any]]
    marks: list[_Mark]
    tools: Sequence[Mapping[str, Any]]
    full: _Marked

    def turn(self, index: int) -> TurnSpan:
        own = [mark for mark in self.marks if mark.message == index]
        shown = [mark for mark in own if mark.opening in self.full.places and mark.closing in self.full.places]
        floor, ceiling = self._neighbours(index)
        if not shown:
            # An empty reply, or one that the template does not show at all: there is nothing to learn.
            return TurnSpan(
                message=index,
                start=floor,
                end=floor,
                thinking_kept=not any(mark.kind == "thinking" for mark in own),
                calls_kept=not any(mark.kind == "call" for mark in own),
                altered=bool(own),
            )
        first = min(shown, key=lambda mark: self.full.places[mark.opening])
        last = max(shown, key=lambda mark: self.full.places[mark.closing])
        text, places = self.full.text, self.full.places
        if not floor <= places[first.opening] <= places[last.closing] <= ceiling:
            raise _NoProof(f"turn {index} is not between its neighbours")
        return TurnSpan(
            message=index,
            start=self._start(index, first, floor),
            end=self._end(index, last, ceiling),
            thinking_kept=all(mark in shown for mark in own if mark.kind == "thinking"),
            calls_kept=all(mark in shown for mark in own if mark.kind == "call"),
            altered=len(shown) != len(own)
            or any(text[places[mark.opening] : places[mark.closing]] != mark.core for mark in shown),
        )

    def _neighbours(self, index: int) -> tuple[int, int]:
        """Give the end of the text of earlier turns and the start of later ones. Templates may move system text."""
        floor, ceiling = 0, len(self.full.text)
        for mark in self.marks:
            if mark.message == index or self.messages[mark.message]["role"] == "system":
                continue
            if mark.message < index and mark.closing in self.full.places:
                floor = max(floor, self.full.places[mark.closing])
            elif mark.message > index and mark.opening in self.full.places:
                ceiling = min(ceiling, self.full.places[mark.opening])
        return floor, ceiling

    def _start(self, index: int, leading: _Mark, floor: int) -> int:
        """Find where the turn's own text begins: at its first character, thinking marks and call syntax included."""
        first = self.full.places[leading.opening]
        if leading.kind == "content" and not leading.lead:
            return first
        head = self.full.text[floor:first]
        common = self._header_length(index, head, floor)
        if leading.kind == "content":
            # Nothing but the text's own leading whitespace, as far as the template kept it, comes before.
            own = _common(head[::-1], leading.lead[::-1])
            return first - own if common is None else max(floor + common, first - own)
        if common is None:
            raise _NoProof(f"the header of turn {index} cannot be told from its text")
        return floor + common

    def _header_length(self, index: int, head: str, floor: int) -> int | None:
        """Compare the text before a turn with the generation prompt at that place: what both have is the header."""
        if index == 0:
            return None
        prompt = self.finder._take_out(self.marked[:index], self.marks, self.tools, generation_prompt=True)
        if prompt is None:
            return None
        before = {
            mark.closing: prompt.places[mark.closing]
            for mark in self.marks
            if mark.closing in prompt.places and self.messages[mark.message]["role"] != "system"
        }
        anchor = max(before, key=lambda sentinel: before[sentinel], default=None)
        at = 0 if anchor is None else before[anchor]
        if floor != (0 if anchor is None else self.full.places.get(anchor, -1)):
            return None
        common = _common(head, prompt.text[at:])
        return self._snap(head, common) if common < len(prompt.text) - at else common

    def _end(self, index: int, trailing: _Mark, ceiling: int) -> int:
        """Find where the turn ends: after its end token, before anything of the next turn."""
        last = self.full.places[trailing.closing]
        tail = self.full.text[last:ceiling]
        final = index == len(self.messages) - 1
        # Between plain text and the next turn stands nothing but the template's own words: learned once.
        plain = trailing.kind == "content" and not trailing.trail
        key = (tail, "" if final else self.messages[index + 1]["role"])
        if plain and key in self.finder._ends:
            return last + self.finder._ends[key]
        other = self._other_tail(index, trailing, final=final)
        kept = _common(tail, trailing.trail) if trailing.kind == "content" else 0
        if other is None and trailing.kind == "call" and not final:
            raise _NoProof(f"the end of the call in turn {index} cannot be told from what follows")
        length = self._end_of(tail, other, kept, final=final)
        if plain:
            self.finder._ends[key] = length
        return last + length

    def _other_tail(self, index: int, trailing: _Mark, *, final: bool) -> str | None:
        """Give the text after this turn when the conversation goes on otherwise: to a user, or to its end."""
        if final:
            last_plane = _PLANES[1] + _PLANE_SIZE
            opening, closing = chr(last_plane - 1), chr(last_plane - 2)
            user = _Mark(message=index + 1, opening=opening, closing=closing, kind="content", core="a")
            more = {"role": "user", "content": f"{opening}a{closing}"}
            other = self.finder._take_out([*self.marked, more], [*self.marks, user], self.tools)
            stop = None if other is None else other.places.get(opening)
        else:
            other = self.finder._take_out(self.marked[: index + 1], self.marks, self.tools)
            stop = None if other is None else len(other.text)
        if other is None or stop is None:
            return None
        at = other.places.get(trailing.closing)
        return None if at is None or at > stop else other.text[at:stop]

    def _end_of(self, tail: str, other: str | None, kept: int, *, final: bool) -> int:
        if other is None:
            common = len(tail) if final else kept + self._first_control(tail[kept:])
            return max(len(tail[:common].rstrip()), kept)
        common = _common(tail, other)
        if common < min(len(tail), len(other)):
            common = self._snap(tail, common)
        if common <= kept and tail and other:
            # An end token that differs between the last turn and earlier ones.
            common = max(common, kept + self._first_control(tail[kept:]))
        return max(len(tail[:common].rstrip()), min(kept, common))

    def _first_control(self, tail: str) -> int:
        return max((len(token) for token in self.finder.control_tokens if tail.startswith(token)), default=0)

    def _snap(self, text: str, at: int) -> int:
        """Move a point of divergence back to where the token begins that it falls into."""
        for begin in range(max(0, at - 48), at):
            if any(text.startswith(token, begin) and begin + len(token) > at for token in self.finder.control_tokens):
                return begin
        while at and text[at - 1] in "<|[":
            at -= 1
        return at


def _mark(messages: Sequence[Mapping[str, Any]], text: str, style: str) -> tuple[list[dict[str, Any]], list[_Mark]]:
    """Copy messages with a pair of sentinels in every piece of text."""
    plane = next((plane for plane in _PLANES if not any(_in_plane(plane, char) for char in set(text))), None)
    if plane is None:
        raise RowRefused("mask-not-provable", "the text uses characters of both private planes")
    pen = _Pen(plane=plane, blanks=style == "every")
    out = []
    for index, message in enumerate(messages):
        copy = dict(message)
        for key in _TEXT_KEYS[1:]:
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
    marks: list[_Mark] = field(default_factory=list)

    def wrap(self, piece: str, index: int, kind: Literal["content", "thinking", "call"], *, blank: bool = False) -> str:
        """Put sentinels at the ends of the visible text; `blank` pieces get them, too, where there is none."""
        core = piece.strip()
        number = 2 * len(self.marks)
        if number + 4 >= _PLANE_SIZE or not (core or blank):
            return piece
        at = piece.find(core) if core else 0
        mark = _Mark(
            message=index,
            opening=chr(self.plane + number),
            closing=chr(self.plane + number + 1),
            kind=kind,
            core=core,
            lead=piece[:at],
            trail=piece[at + len(core) :],
        )
        self.marks.append(mark)
        return f"{mark.lead}{mark.opening}{core}{mark.closing}{mark.trail}"


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


def _check_tiles(turns: Sequence[TurnSpan], marks: Sequence[_Mark], full: _Marked) -> None:
    """Insist that the spans are in order and hold nothing that another message put there."""
    at = 0
    for turn in turns:
        if not at <= turn.start <= turn.end:
            raise _NoProof(f"turn {turn.message} overlaps the one before")
        at = turn.end
    spans = {turn.message: turn for turn in turns}
    for mark in marks:
        place = full.places.get(mark.opening)
        if place is None:
            continue
        own = spans.get(mark.message)
        if own is not None and not own.start <= place <= own.end:
            raise _NoProof(f"text of turn {mark.message} lies outside its span")
        for turn in turns:
            if turn is not own and turn.start < full.places.get(mark.closing, place) and place < turn.end:
                raise _NoProof(f"text of message {mark.message} lies inside turn {turn.message}")


def _thinking_of(message: Mapping[str, Any]) -> str:
    return next((str(message[key]) for key in _TEXT_KEYS[1:] if message.get(key)), "")


def _in_plane(plane: int, char: str) -> bool:
    return plane <= ord(char) < plane + 0x10000


def _common(one: str, other: str) -> int:
    """Count the characters that both begin with."""
    limit = min(len(one), len(other))
    if one[:limit] == other[:limit]:
        return limit
    low, high = 0, limit
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle)
    return low
