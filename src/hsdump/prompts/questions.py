"""Rows as questions: what the target is to answer, instead of what somebody answered before.

Everything of a row stays, except the assistant's own words: each of its replies is a place where the target answers.
Calls whose results the row holds stay too, because a result belongs to its call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import msgspec

from hsdump.arrays import xxh3
from hsdump.prompts.conversation import Message
from hsdump.prompts.options import PromptOptions, RowRefused
from hsdump.prompts.rows import LIST_KEYS, find_pair, pair_history, read_tools, read_turns, refuse_media, with_call_ids


@dataclass(frozen=True, kw_only=True)
class Question:
    """A conversation with gaps."""

    turns: tuple[Message | None, ...]
    """None: the target answers here. Ends with one."""

    tools: tuple[dict[str, Any], ...] = ()

    kept_replies: int = 0
    """Turns of the assistant that stay as the row has them; they are context and carry no loss."""

    @cached_property
    def key(self) -> str:
        """Identify the question by content, as 32 hex digits: equal questions are asked once."""
        return xxh3(msgspec.json.encode([self.turns, self.tools], order="deterministic"))

    @property
    def num_answers(self) -> int:
        return sum(turn is None for turn in self.turns)


def parse_question(value: Any, options: PromptOptions, replies: Literal["all", "last"] = "all") -> tuple[str, Question]:
    """Recognise one row, with or without replies in it.

    Args:
        value: the row, in any shape that `parse_row` knows, or a text alone.
        options: as for `parse_row`.
        replies: which replies of the row the target gives anew: all, or only the last one.

    Returns:
        The shape's name, for counting, and the question.

    Raises:
        RowRefused: there is nothing to answer, or something is not understood.
    """
    shape, messages, tools = _turns(value, options)
    if all(message.role == "system" for message in messages):
        raise RowRefused("no-user-turn", "nothing to answer: no turn of a user")
    if any(message.role == "user" and not message.content.strip() for message in messages):
        raise RowRefused("empty", "a turn of the user is empty")
    messages = with_call_ids(messages)
    gaps = _gaps(messages, every_user=shape == "turns")
    if replies == "last" and shape != "turns":
        gaps = {max(gaps)}
        messages = messages[: max(gaps) + 1]
    turns: list[Message | None] = []
    for index, message in enumerate(messages):
        given = message.role != "assistant" or index not in gaps
        if given and not (message.role == "assistant" and index and turns[-1] is None):
            turns.append(message)
        if index in gaps:
            turns.append(None)
    while turns[-1] is not None:
        turns.pop()  # what stands after the last answer has no part in it
    kept = sum(turn is not None and turn.role == "assistant" for turn in turns)
    return shape, Question(turns=tuple(turns), tools=tools, kept_replies=kept)


def _gaps(messages: list[Message], *, every_user: bool) -> set[int]:
    """Give the places of replies that are asked for anew, and of asking turns that have no reply yet."""
    gaps = set()
    for index, message in enumerate(messages):
        following = messages[index + 1].role if index + 1 < len(messages) else None
        if message.role == "assistant":
            asked = index > 0 and messages[index - 1].role in ("user", "tool")
            if asked and following != "tool" and message.learn:
                gaps.add(index)
        elif message.role in ("user", "tool") and (following is None or (every_user and following == "user")):
            gaps.add(index)
    if not gaps:
        raise RowRefused("no-user-turn", "nothing to answer: no reply follows a user, or results follow each")
    return gaps


def _turns(value: Any, options: PromptOptions) -> tuple[str, list[Message], tuple[dict[str, Any], ...]]:
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        value = {"messages": value}
    if isinstance(value, str):
        value = {"text": value}
    if not isinstance(value, Mapping):
        raise RowRefused("unknown-shape", f"the row is {type(value).__name__}, not an object with messages")
    if value.get("input_ids") is not None:
        raise RowRefused("tokens-given", "the row is tokens already; the target answers conversations")
    for key in LIST_KEYS:
        if isinstance(value.get(key), list | tuple):
            shape, messages = read_turns(value, key, options)
            return shape, messages, read_tools(value.get("tools"))
    refuse_media(value)
    shape, texts = _texts(value)
    turns = [*pair_history(value), *({"role": "user", "content": text} for text in texts)]
    _, messages = read_turns({"messages": turns}, "messages", options)
    return shape, messages, read_tools(value.get("tools"))


def _texts(value: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Give what a user says in a row that has no list of turns."""
    pair = find_pair(value)
    if pair is not None and pair[0] == "turns":
        return "turns", list(value["turns"])
    if pair is not None:
        return pair[0], [pair[1]]
    if isinstance(value.get("text"), str):
        return "text", [value["text"]]
    keys = ", ".join(sorted(map(str, value))) or "none"
    raise RowRefused("unknown-shape", f"no messages, conversations or prompt; the row's keys are: {keys}")
