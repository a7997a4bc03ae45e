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
from dataclasses import dataclass, field
from typing import Any, Literal

from hsdump.prompts.conversation import THINK_CLOSE, THINK_OPEN
from hsdump.prompts.options import RowRefused
from hsdump.prompts.template import Template

Strategy = Literal["generation", "sentinel", "prefix"]

_PLANES = (0xF0000, 0x100000)
"""First code points of the two private planes: no language, no case, no whitespace, never normalised."""

_PLANE_SIZE = 0xFFFE
_TEXT_KEYS = ("content", "reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnSpan:
    """One assistant turn in the rendered text."""

    message: int
    start: int
    end: int

    thinking_kept: bool
    """False when the turn has thinking in the data and the template did not show it."""

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
    piece: str
    thinking: bool
    lead: int
    """Whitespace characters of the piece before the opening sentinel."""

    trail: int


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
        marked_messages, marks = _mark(messages, text)
        try:
            turns = self._sentinel_turns(messages, tools, text, (marked_messages, marks))
        except _NoProof as no_proof:
            turns = self._prefix_turns(messages, tools, text, str(no_proof))
            return Layout(text=text, turns=turns, strategy="prefix")
        if spans:
            return Layout(text=text, turns=self._generation_turns(text, spans, turns), strategy="generation")
        return Layout(text=text, turns=turns, strategy="sentinel")

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
            out.append(
                TurnSpan(
                    message=turn.message,
                    start=start,
                    end=stop,
                    thinking_kept=turn.thinking_kept,
                    altered=turn.altered,
                )
            )
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
            end = len(after.rstrip()) if content == content.rstrip() else len(after)
            turns.append(
                TurnSpan(
                    message=index,
                    start=len(before),
                    end=max(end, len(before)),
                    thinking_kept=not _thinking_of(message).strip() or _thinking_of(message).strip() in after,
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
        first = min((self.full.places[mark.opening] for mark in shown), default=None)
        last = max((self.full.places[mark.closing] for mark in shown), default=None)
        if first is not None and last is not None and not floor <= first <= last <= ceiling:
            raise _NoProof(f"turn {index} is not between its neighbours")
        start = self._start(index, shown, floor, ceiling if first is None else first)
        end = self._end(index, shown, start if last is None else last, ceiling)
        text = self.full.text
        thinking = [mark for mark in own if mark.thinking]
        kept = all(mark in shown for mark in thinking)
        altered = len(shown) != len(own) or any(
            text[self.full.places[mark.opening] : self.full.places[mark.closing]] != mark.piece
            for mark in shown
            if _is_content(mark)
        )
        return TurnSpan(message=index, start=start, end=end, thinking_kept=kept, altered=altered)

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

    def _start(self, index: int, shown: list[_Mark], floor: int, first: int) -> int:
        """Find where the turn's own text begins: at its first character, thinking marks and call syntax included."""
        leading = min(shown, key=lambda mark: self.full.places[mark.opening], default=None)
        if leading is not None and leading.piece and not leading.thinking and not leading.lead and _is_content(leading):
            return first
        head = self.full.text[floor:first]
        common = self._header_length(index, head, floor)
        if leading is not None and _is_content(leading) and not leading.thinking:
            # Nothing but the text's own leading whitespace, as far as the template kept it, comes before.
            own = min(leading.lead, len(head) - len(head.rstrip()))
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

    def _end(self, index: int, shown: list[_Mark], last: int, ceiling: int) -> int:
        """Find where the turn ends: after its end token, before anything of the next turn."""
        tail = self.full.text[last:ceiling]
        trailing = max(shown, key=lambda mark: self.full.places[mark.closing], default=None)
        plain = trailing is not None and _is_content(trailing) and not trailing.trail
        final = index == len(self.messages) - 1
        key = (tail, self.messages[index + 1]["role"] if not final else "")
        if plain and key in self.finder._ends:
            return last + self.finder._ends[key]
        other = self._other_tail(index, final=final, trailing=trailing)
        kept = trailing.trail if trailing is not None and _is_content(trailing) else 0
        length = self._end_of(tail, other, kept)
        if plain:
            self.finder._ends[key] = length
        return last + length

    def _other_tail(self, index: int, *, final: bool, trailing: _Mark | None) -> str | None:
        """Give the text after this turn when the conversation goes on otherwise: to a user, or to its end."""
        if final:
            sentinel = _Mark(
                message=index + 1,
                opening=chr(_PLANES[1] + _PLANE_SIZE - 1),
                closing=chr(_PLANES[1] + _PLANE_SIZE - 2),
                piece="a",
                thinking=False,
                lead=0,
                trail=0,
            )
            more = {"role": "user", "content": f"{sentinel.opening}a{sentinel.closing}"}
            other = self.finder._take_out([*self.marked, more], [*self.marks, sentinel], self.tools)
            stop = None if other is None else other.places.get(sentinel.opening)
        else:
            other = self.finder._take_out(self.marked[: index + 1], self.marks, self.tools)
            stop = None if other is None else len(other.text)
        if other is None or stop is None:
            return None
        if trailing is not None:
            at = other.places.get(trailing.closing)
        else:
            at = max((other.places.get(mark.closing, 0) for mark in self.marks if mark.message < index), default=0)
        return None if at is None or at > stop else other.text[at:stop]

    def _end_of(self, tail: str, other: str | None, kept: int) -> int:
        if other is None:
            return max(self._first_control(tail), min(kept, len(tail)))
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


def _mark(messages: Sequence[Mapping[str, Any]], text: str) -> tuple[list[dict[str, Any]], list[_Mark]]:
    """Copy messages with a pair of sentinels in every piece of text."""
    plane = next((plane for plane in _PLANES if not any(_in_plane(plane, char) for char in set(text))), None)
    if plane is None:
        raise RowRefused("mask-not-provable", "the text uses characters of both private planes")
    marks: list[_Mark] = []

    def wrap(piece: str, index: int, *, thinking: bool, content: bool = True) -> str:
        core = piece.strip()
        number = 2 * len(marks)
        if not core or number + 4 >= _PLANE_SIZE:
            return piece
        lead = len(piece) - len(piece.lstrip())
        trail = len(piece) - len(piece.rstrip())
        opening, closing = chr(plane + number), chr(plane + number + 1)
        marks.append(
            _Mark(
                message=index,
                opening=opening,
                closing=closing,
                piece=core if content else "",
                thinking=thinking,
                lead=lead,
                trail=trail,
            )
        )
        return piece[:lead] + opening + core + closing + piece[len(piece) - trail :]

    out = []
    for index, message in enumerate(messages):
        copy = dict(message)
        for key in _TEXT_KEYS[1:]:
            if isinstance(copy.get(key), str):
                copy[key] = wrap(copy[key], index, thinking=True)
        if message["role"] == "assistant":
            copy["content"] = _wrap_thinking(copy["content"], index, wrap)
        else:
            copy["content"] = wrap(copy["content"], index, thinking=False)
        if copy.get("tool_calls"):
            copy["tool_calls"] = [_wrap_call(call, index, wrap) for call in copy["tool_calls"]]
        out.append(copy)
    return out, marks


def _wrap_thinking(content: str, index: int, wrap: Any) -> str:
    """Mark the pieces between think marks apart, so that a template can drop or move each as before."""
    before, close, after = content.rpartition(THINK_CLOSE)
    if not close:
        lead, opened, rest = content.partition(THINK_OPEN)
        if opened and not lead.strip():
            return lead + opened + str(wrap(rest, index, thinking=False))
        return str(wrap(content, index, thinking=False))
    lead, opened, thinking = before.rpartition(THINK_OPEN)
    return "".join(
        (
            wrap(lead, index, thinking=False),
            opened,
            wrap(thinking, index, thinking=True),
            close,
            wrap(after, index, thinking=False),
        )
    )


def _wrap_call(call: Mapping[str, Any], index: int, wrap: Any) -> dict[str, Any]:
    function = dict(call["function"])
    function["name"] = wrap(function["name"], index, thinking=False, content=False)
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


def _is_content(mark: _Mark) -> bool:
    return bool(mark.piece)


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
