"""Which characters of a rendered conversation are the assistant's own: found by proof, or refused.

The proof. Every turn's text gets two sentinels, one at each end of its visible part, so that trimming, splitting at
think marks and conditions on emptiness behave as before. The template renders the marked conversation, too. If taking
the sentinels out gives the plain rendering back, byte for byte, then the sentinels show where the template put each
turn. Where a turn begins (after its header) and ends (after its end token) is found by comparing the text between
two turns with the generation prompt, and with a conversation that ends there. What a user typed is never searched for
a role header, so a header in it changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hsdump.prompts.options import RowRefused
from hsdump.prompts.sentinels import STYLES, THINKING_KEYS, Mark, Marked, mark_messages, take_out, user_sentinels
from hsdump.prompts.template import Template

_MAX_ENDS = 10_000
"""Fixed texts between turns that are remembered; one template has a dozen."""

Strategy = Literal["generation", "sentinel", "prefix", "all"]


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
        for style in STYLES:
            try:
                view = self._view(messages, tools, text, style)
                turns = view.turns()
                if spans:
                    turns = _generation_turns(text, spans, turns)
                check_tiles(turns, view.marks, view.full)
            except _NoProof as no_proof:
                why = why or str(no_proof)
                continue
            return Layout(text=text, turns=turns, strategy="generation" if spans else "sentinel")
        return Layout(text=text, turns=self._prefix_turns(messages, tools, text, why), strategy="prefix")

    def _view(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], text: str, style: str
    ) -> _View:
        marked, marks = mark_messages(messages, text, style)
        full = self._take_out(marked, marks, tools)
        if full is None or full.text != text:
            raise _NoProof("the template renders marked text differently")
        return _View(finder=self, messages=messages, marked=marked, marks=marks, tools=tools, full=full, style=style)

    def _take_out(
        self,
        marked: Sequence[Mapping[str, Any]],
        marks: Sequence[Mark],
        tools: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool = False,
    ) -> Marked | None:
        """Render marked messages and remove the sentinels; None when the template refuses them."""
        try:
            text = self.template.render(marked, tools, generation_prompt=generation_prompt)
        except RowRefused:
            return None
        return take_out(text, marks)

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
    marks: list[Mark]
    tools: Sequence[Mapping[str, Any]]
    full: Marked
    style: str

    def turns(self) -> tuple[TurnSpan, ...]:
        return tuple(self.turn(index) for index, message in enumerate(self.messages) if message["role"] == "assistant")

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

    def _start(self, index: int, leading: Mark, floor: int) -> int:
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
        prompt = self._before(index, generation_prompt=True) if index else None
        if prompt is None:
            return None
        before = {
            mark.closing: prompt.places[mark.closing]
            for mark in self.marks
            if mark.closing in prompt.places and self.messages[mark.message]["role"] != "system"
        }
        anchor = max(before, key=lambda sentinel: before[sentinel], default=None)
        if floor != (0 if anchor is None else self.full.places.get(anchor, -1)):
            return None
        prompted = prompt.text[0 if anchor is None else before[anchor] :]
        common = _common(head, prompted)
        return common if common == len(prompted) else self._partial_header(index, head, prompted, common)

    def _partial_header(self, index: int, head: str, prompted: str, common: int) -> int | None:
        """Decide where the generation prompt and the real text part: inside the prompt's words, or before them.

        Inside: the prompt opens the thinking, say, and the turn has none. Before: the template ends a last message
        otherwise than an inner one; then the prompt's words are looked for in the fixed text before the turn.
        """
        prompt, plain = self._before(index, generation_prompt=True), self._before(index, generation_prompt=False)
        if prompt is None or plain is None or not prompt.text.startswith(plain.text):
            return None
        generation = prompt.text[len(plain.text) :]
        if common > len(prompted) - len(generation):
            return self._snap(head, common)
        fixed = self.style != "inner"  # else a user's own words stand in it, too
        if fixed and generation and head.count(generation) == 1:
            return head.index(generation) + len(generation)
        return None

    def _before(self, index: int, *, generation_prompt: bool) -> Marked | None:
        return self.finder._take_out(self.marked[:index], self.marks, self.tools, generation_prompt=generation_prompt)

    def _end(self, index: int, trailing: Mark, ceiling: int) -> int:
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
        if plain and len(self.finder._ends) < _MAX_ENDS:
            self.finder._ends[key] = length
        return last + length

    def _other_tail(self, index: int, trailing: Mark, *, final: bool) -> str | None:
        """Give the text after this turn when the conversation goes on otherwise: to a user, or to its end."""
        if final:
            opening, closing = user_sentinels(trailing)
            user = Mark(message=index + 1, opening=opening, closing=closing, kind="content", core="a")
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
        if common <= kept and tail[kept:] and other[kept:]:
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


def _generation_turns(text: str, spans: list[tuple[int, int]], turns: tuple[TurnSpan, ...]) -> tuple[TurnSpan, ...]:
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


def check_tiles(turns: Sequence[TurnSpan], marks: Sequence[Mark], full: Marked) -> None:
    """Insist that the spans are in order and hold nothing that another message put there."""
    at = 0
    for turn in turns:
        if turn.start == turn.end:
            continue  # nothing of it is shown, so it has no place of its own
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
    return next((str(message[key]) for key in THINKING_KEYS if message.get(key)), "")


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
