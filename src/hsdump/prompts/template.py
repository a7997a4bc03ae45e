"""The model's own chat template, rendered exactly as transformers renders it, on a day that never changes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from hsdump.errors import UsageError
from hsdump.lean import torch_hidden
from hsdump.prompts.conversation import THINK_CLOSE, THINK_OPEN, Message
from hsdump.prompts.options import RowRefused
from hsdump.prompts.sentinels import THINKING_KEYS

_PROBE = "hsdumpprobe"


@dataclass(frozen=True, kw_only=True)
class Template:
    """One template text with the values that it may ask for."""

    text: str
    special_tokens: Mapping[str, Any]
    date: datetime

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation_prompt: bool = False,
    ) -> str:
        """Render messages in the template's own form (see `template_messages`).

        Raises:
            RowRefused: the template does not take these messages; its own words are the detail.
            UsageError: this environment has nothing to render templates with.
        """
        return self._render(messages, tools, generation_prompt=generation_prompt, spans=False)[0]

    def render_spans(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render, and give the character ranges of the template's own `{% generation %}` blocks."""
        return self._render(messages, tools, generation_prompt=False, spans=True)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool,
        spans: bool,
    ) -> tuple[str, list[tuple[int, int]]]:
        # Here, because its import takes a second, and who is given token ids never needs it.
        with torch_hidden():
            from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, ranges = render_jinja_template(
                conversations=[list(messages)],
                tools=list(tools) or None,
                chat_template=self.text,
                return_assistant_tokens_mask=spans,
                add_generation_prompt=generation_prompt,
                strftime_now=self.date.strftime,
                **self.special_tokens,
            )
        except ImportError as error:  # of this environment, and so of every row
            raise UsageError(f"chat templates cannot be rendered here: {error}", "pip install jinja2") from error
        except Exception as error:
            # A template is a program of someone else: whatever it raises is its answer to this row.
            raise RowRefused("template-rejected", f"{type(error).__name__}: {error}") from error
        return texts[0], ranges[0] if spans else []

    @cached_property
    def has_generation_spans(self) -> bool:
        """True when the template marks the assistant's text itself, found by trying."""
        if "endgeneration" not in self.text:
            return False
        try:
            _, spans = self.render_spans([{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}])
        except RowRefused:
            return False
        return bool(spans)

    @cached_property
    def thinking_field(self) -> str | None:
        """The message key that this template reads thinking from, found by trying a last turn and a last call."""
        call = {"content": "", "tool_calls": [_probe_call({"city": "c"})]}
        for field in THINKING_KEYS:
            if self._shows({"content": "b", field: _PROBE}) or self._shows({**call, field: _PROBE}):
                return field
        # Some show it only in the middle of a chain of calls, where a probe does not reach.
        return THINKING_KEYS[0] if THINKING_KEYS[0] in self.text else None

    @property
    def shows_thinking(self) -> bool:
        """False when no rendering brings thinking back, so that cutting a conversation for it is no use."""
        return self.thinking_field is not None or self.reads_inline_thinking

    @cached_property
    def reads_inline_thinking(self) -> bool:
        """True when thinking may stay between think marks in the content.

        Where the template reads a key as well, both ways must give one text: else it would show the marks twice.
        """
        inline = {"content": f"<think>\n{_PROBE}\n</think>\n\nb"}
        if self.thinking_field is None:
            return THINK_CLOSE in self.text and self._shows(inline)
        return self._last_turn(inline) == self._last_turn({"content": "b", self.thinking_field: _PROBE})

    @cached_property
    def null_content(self) -> bool:
        """True when a call without text wants content null: with empty text, a reply of nothing would be added."""
        call = {"tool_calls": [_probe_call({"city": "c"})]}
        null, empty = self._last_turn({**call, "content": None}), self._last_turn({**call, "content": ""})
        return null is not None and "None" not in null and (empty is None or len(null) < len(empty))

    def _shows(self, message: Mapping[str, Any]) -> bool:
        return _PROBE in (self._last_turn(message) or "")

    def _last_turn(self, message: Mapping[str, Any]) -> str | None:
        tools = [_PROBE_TOOL] if "tool_calls" in message else []
        try:
            return self.render([{"role": "user", "content": "a"}, {"role": "assistant", **message}], tools)
        except RowRefused:
            return None

    @cached_property
    def argument_forms(self) -> tuple[bool, bool]:
        """(takes a mapping, takes JSON text), found by trying: text that comes out escaped again does not count."""
        as_mapping, as_text = (
            self._last_turn({"content": "", "tool_calls": [_probe_call(arguments)]})
            for arguments in ({"city": _PROBE}, json.dumps({"city": _PROBE}))
        )
        text_ok = as_text is not None and f'"{_PROBE}"' in as_text
        return as_mapping is not None and _PROBE in as_mapping, text_ok


_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "d",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "c"}}},
    },
}


def _probe_call(arguments: Any) -> dict[str, Any]:
    return {"id": "000000000", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def template_messages(template: Template, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Put messages into the form that this template shows in full.

    Thinking goes into the key that the template reads, or inline where it reads think marks; where it does neither,
    the thinking is not rendered and the caller finds it missing. Tool arguments become a mapping or JSON text.

    Raises:
        RowRefused: tool arguments are broken JSON and the template needs a mapping.
    """
    return [_template_message(template, message) for message in messages]


def _template_message(template: Template, message: Message) -> dict[str, Any]:
    content, thinking = message.content, message.thinking if message.has_thinking else None
    field = template.thinking_field
    if thinking is None and field is not None and not template.reads_inline_thinking and message.has_thinking:
        # This template reads thinking from a key only: inline marks would come beside its own.
        content, thinking = message.without_thinking().content, message.inline_thinking.strip("\n")
    out: dict[str, Any] = {"role": message.role, "content": content, **message.extra}
    if thinking:
        if field is None and template.reads_inline_thinking:
            out["content"] = f"{THINK_OPEN}\n{thinking}\n{THINK_CLOSE}\n\n{content}"
        else:
            # Without a key that the template reads, this one is not shown, and so is counted as lost.
            out[field or THINKING_KEYS[0]] = thinking
    if message.tool_calls:
        out["tool_calls"] = [_template_call(template, call) for call in message.tool_calls]
        if not content and template.null_content:
            out["content"] = None
    return out


def _template_call(template: Template, call: dict[str, Any]) -> dict[str, Any]:
    mapping_ok, text_ok = template.argument_forms
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str) and not text_ok:
        raise RowRefused("bad-tool-call", "tool call arguments are not JSON, and the template needs a mapping")
    if not isinstance(arguments, str) and text_ok and not mapping_ok:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}
