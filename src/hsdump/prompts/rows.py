"""One row, in any of the shapes of the field, to one conversation. The shape is found per row.

Rules that a reader of the report should know: null content is empty text; text parts are joined; parts that are not
text are refused; turns after the last assistant turn are dropped, because nothing in them is learned.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from hsdump.prompts.conversation import Conversation, Message, Role, TextRow, TokenRow
from hsdump.prompts.options import PromptOptions, RowRefused

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
"""Role names as found in data. `function_call` turns hold a call instead of text."""

_CALL_ROLES = frozenset({"function_call", "tool_call"})
_MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
_MEDIA_PARTS = frozenset({"image", "image_url", "input_image", "video", "video_url", "audio", "input_audio", "file"})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_THINKING_PARTS = frozenset({"reasoning", "thinking"})
_THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
_WEIGHT_KEYS = ("weight", "loss_weight", "train")
"""Keys of a turn that say with 0 or false that it is not learned. Other weights count as 1: a mask has no shades."""

LIST_KEYS = ("messages", "conversations", "conversation")
_PAIR_KEYS = (
    ("prompt", ("completion", "response", "answer", "output")),
    ("question", ("answer", "response", "output")),
    ("query", ("response", "answer", "output")),
)
"""Names of a question, and for each the names that its answer may have, the first that is there."""


def parse_row(value: Any, options: PromptOptions) -> tuple[str, Conversation | TokenRow | TextRow]:
    """Recognise one row.

    Returns:
        The shape's name, for counting, and the row in our own form.

    Raises:
        RowRefused: the row holds nothing to learn from, or something that is not understood.
    """
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        value = {"messages": value}
    if isinstance(value, str):
        raise RowRefused("no-assistant-turn", "the row is a prompt alone, with no answer to learn")
    if not isinstance(value, Mapping):
        raise RowRefused("unknown-shape", f"the row is {type(value).__name__}, not an object with messages")
    if value.get("input_ids") is not None:
        return "tokens", TokenRow(input_ids=value["input_ids"], loss_mask=value.get("loss_mask"))
    for key in LIST_KEYS:
        if isinstance(value.get(key), list | tuple):
            return _conversation(value, key, options)
    pair = find_pair(value)
    if pair is not None:
        return _pair_conversation(value, pair, options)
    if isinstance(value.get("text"), str):
        if not value["text"].strip():
            raise RowRefused("empty", "text is empty")
        return "text", TextRow(text=value["text"])
    keys = ", ".join(sorted(map(str, value))) or "none"
    raise RowRefused("unknown-shape", f"no messages, conversations or input_ids; the row's keys are: {keys}")


def find_pair(value: Mapping[str, Any]) -> tuple[str, str, str | None] | None:
    """Find a question and its answer under the names of the field: (shape, question, answer or None)."""
    if isinstance(value.get("instruction"), str):
        question, answer = value["instruction"], value.get("output", value.get("response"))
        given = value.get("input")
        instances = value.get("instances")
        if answer is None and isinstance(instances, list) and len(instances) == 1 and isinstance(instances[0], Mapping):
            given, answer = instances[0].get("input"), instances[0].get("output")
        if isinstance(given, str) and given.strip():
            question = f"{question}\n\n{given}"
        return "alpaca", question, answer if isinstance(answer, str) else None
    turns = value.get("turns")
    if isinstance(turns, list | tuple) and turns and all(isinstance(turn, str) for turn in turns):
        return "turns", turns[0], None
    for asked, answered in _PAIR_KEYS:
        if isinstance(value.get(asked), str):
            answer = next((value[key] for key in answered if isinstance(value.get(key), str)), None)
            return "pair", value[asked], answer
    return None


def _pair_conversation(
    value: Mapping[str, Any], pair: tuple[str, str, str | None], options: PromptOptions
) -> tuple[str, Conversation]:
    shape, question, answer = pair
    refuse_media(value)
    if answer is None:
        raise RowRefused("no-assistant-turn", f"the row is a prompt alone ({shape}), with no answer to learn")
    turns = [*pair_history(value), {"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return shape, _conversation({"messages": turns, "tools": value.get("tools")}, "messages", options)[1]


def pair_history(value: Mapping[str, Any]) -> list[Any]:
    """Give the turns that a row of a question and an answer keeps under `system` and `history`."""
    turns: list[Any] = [{"role": "system", "content": value["system"]}] if value.get("system") else []
    for exchange in value.get("history") or ():
        if not (isinstance(exchange, list | tuple) and len(exchange) == 2):
            raise RowRefused("unknown-shape", "history is not a list of (question, answer)")
        turns += [{"role": "user", "content": exchange[0]}, {"role": "assistant", "content": exchange[1]}]
    return turns


def refuse_media(value: Mapping[str, Any]) -> None:
    """Refuse a row that keeps media beside its text."""
    for media in _MEDIA_KEYS:
        if value.get(media):
            raise RowRefused("image-content", f"image content is not supported: the row has {media!r}")


def _conversation(value: Mapping[str, Any], key: str, options: PromptOptions) -> tuple[str, Conversation]:
    shape, messages = read_turns(value, key, options)
    return shape, finish(messages, read_tools(value.get("tools")))


def read_turns(value: Mapping[str, Any], key: str, options: PromptOptions) -> tuple[str, list[Message]]:
    """Read the list of turns under `key`, with the system text that the row keeps beside it.

    Raises:
        RowRefused: a turn that is not understood, or media.
    """
    turns = value[key]
    if not turns:
        raise RowRefused("empty", f"{key} is an empty list")
    refuse_media(value)
    shape = "sharegpt" if isinstance(turns[0], Mapping) and "from" in turns[0] else "messages"
    messages = [_message(turn, index, options) for index, turn in enumerate(turns)]
    chosen = value.get("chosen")
    if messages[-1].role == "user" and isinstance(chosen, Mapping):
        shape = "preference"
        messages.append(_message(chosen, len(messages), options))
    system = value.get("system")
    if not (isinstance(system, str) and system):
        system = options.default_system
    if system and messages[0].role != "system":
        messages.insert(0, Message(role="system", content=system))
    return shape, messages


def finish(messages: list[Message], tools: tuple[dict[str, Any], ...]) -> Conversation:
    """Cut what follows the last assistant turn, and tie tool results to calls where the data has no ids.

    Raises:
        RowRefused: no assistant turn, or none with anything in it.
    """
    last = max((index for index, message in enumerate(messages) if message.role == "assistant"), default=None)
    if last is None:
        raise RowRefused("no-assistant-turn", "nothing to learn: no turn of the assistant")
    replies = [message for message in messages if message.role == "assistant"]
    if all(message.is_blank for message in replies):
        raise RowRefused("no-trainable-tokens", "every turn of the assistant is empty")
    if not any(message.learn for message in replies):
        raise RowRefused("no-trainable-tokens", "the row gives every turn of the assistant the weight 0")
    return Conversation(messages=tuple(with_call_ids(messages[: last + 1])), tools=tools)


def with_call_ids(messages: list[Message]) -> list[Message]:
    """Number calls that have no id with nine digits (the form that the strictest template asks for)."""
    waiting: list[str] = []
    number = 0
    for message in messages:
        if message.tool_calls:
            waiting = []
        for call in message.tool_calls:
            if not call.get("id"):
                call["id"] = f"{number:09d}"
            number += 1
            waiting.append(call["id"])
        if message.role == "tool" and not message.extra.get("tool_call_id") and waiting:
            message.extra["tool_call_id"] = waiting.pop(0)
    return messages


def _message(turn: Any, index: int, options: PromptOptions) -> Message:
    if not isinstance(turn, Mapping):
        raise RowRefused("unknown-shape", f"turn {index} is {type(turn).__name__}, not an object")
    name = turn.get("role", turn.get("from"))
    role = options.roles.get(str(name)) or ROLES.get(str(name).lower())
    if role is None:
        detail = f"turn {index} has role {name!r}; map it with --role {name}=assistant (or user, system, tool)"
        raise RowRefused("unknown-role", detail)
    content, thinking, calls = _content(turn.get("content", turn.get("value")), index)
    if str(name).lower() in _CALL_ROLES:
        content, calls = "", [*calls, *_calls_from_text(content, index)]
    for key in _THINKING_KEYS:
        if thinking is None and isinstance(turn.get(key), str) and turn[key]:
            thinking = turn[key]
    calls.extend(_call(call, index) for call in turn.get("tool_calls") or ())
    if turn.get("function_call"):
        calls.append(_call(turn["function_call"], index))
    if calls and role != "assistant":
        raise RowRefused("unknown-shape", f"turn {index} has tool calls but role {name!r}")
    extra = {key: turn[key] for key in ("name", "tool_call_id") if isinstance(turn.get(key), str) and turn[key]}
    return Message(
        role=role,  # type: ignore[arg-type]  # options.roles is checked where it is read, in Renderer.load
        content=content,
        thinking=thinking if role == "assistant" else None,
        tool_calls=tuple(calls),
        learn=not any(_is_off(turn[key]) for key in _WEIGHT_KEYS if key in turn),
        extra=extra,
    )


def _is_off(weight: Any) -> bool:
    return isinstance(weight, bool | int | float) and not weight


def _content(content: Any, index: int) -> tuple[str, str | None, list[dict[str, Any]]]:
    """Give text, reasoning and tool calls of a turn's content."""
    if content is None:
        return "", None, []
    if isinstance(content, str):
        return content, None, []
    if not isinstance(content, list):
        raise RowRefused("unknown-part", f"turn {index} has content of type {type(content).__name__}")
    texts: list[str] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, Mapping):
            raise RowRefused("unknown-part", f"turn {index} has a part that is {type(part).__name__}")
        kind = part.get("type")
        text = next((part[key] for key in ("text", "value", "content") if isinstance(part.get(key), str)), None)
        if kind in _MEDIA_PARTS:
            raise RowRefused("image-content", f"image content is not supported: turn {index} has a {kind!r} part")
        if kind in _TEXT_PARTS and text is not None:
            texts.append(text)
        elif kind in _THINKING_PARTS and (text is not None or isinstance(part.get(kind), str)):
            thinking.append(text if text is not None else part[kind])
        elif kind == "tool_call" and text is not None:
            calls.extend(_calls_from_text(text, index))
        else:
            raise RowRefused("unknown-part", f"turn {index} has a part of type {kind!r} that is not understood")
    return "".join(texts), "".join(thinking) or None, calls


def _calls_from_text(text: str, index: int) -> list[dict[str, Any]]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RowRefused("bad-tool-call", f"turn {index}: the tool call is not JSON: {error}") from error
    return [_call(call, index) for call in (value if isinstance(value, list) else [value])]


def _call(call: Any, index: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowRefused("bad-tool-call", f"turn {index} has a tool call without a function name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # Broken JSON stays text: some templates can show it, and those that cannot refuse the row.
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments) if arguments.strip() else {}
    out: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str) and call["id"]:
        out["id"] = call["id"]
    return out


def read_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Read `tools` as a list or as the JSON text of one; bare functions get OpenAI's wrapper."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise RowRefused("bad-tools", f"tools is text but not JSON: {error}") from error
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowRefused("bad-tools", f"tools is {type(tools).__name__}, not a list of objects")
    return tuple(
        dict(tool) if "function" in tool or "name" not in tool else {"type": "function", "function": dict(tool)}
        for tool in tools
    )
