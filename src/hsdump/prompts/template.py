"""The model's own chat template, rendered exactly as transformers renders it, on a day that never changes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from hsdump.prompts.conversation import THINK_CLOSE, Message
from hsdump.prompts.options import RowRefused

_FIELDS = ("reasoning_content", "reasoning", "thinking")
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
    def thinking_fields(self) -> tuple[str, ...]:
        """Message keys that this template shows as thinking in the last turn, found by trying."""
        return tuple(field for field in _FIELDS if self._shows({"content": "b", field: _PROBE}))

    @cached_property
    def takes_inline_thinking(self) -> bool:
        """True when the template knows think marks and shows them where the content has them."""
        return THINK_CLOSE in self.text and self._shows({"content": f"<think>\n{_PROBE}\n</think>\n\nb"})

    def _shows(self, message: Mapping[str, Any]) -> bool:
        try:
            text = self.render([{"role": "user", "content": "a"}, {"role": "assistant", **message}])
        except RowRefused:
            return False
        return _PROBE in text

    @cached_property
    def argument_forms(self) -> tuple[bool, bool]:
        """(takes a mapping, takes JSON text), found by trying: text that comes out escaped again does not count."""
        as_mapping = self._call_text({"city": _PROBE})
        as_text = self._call_text(json.dumps({"city": _PROBE}))
        text_ok = as_text is not None and f'"{_PROBE}"' in as_text
        return as_mapping is not None and _PROBE in as_mapping, text_ok

    def _call_text(self, arguments: Any) -> str | None:
        call = {"id": "000000000", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        tool = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}
        try:
            return self.render(messages, [{"type": "function", "function": tool}])
        except RowRefused:
            return None


def template_messages(template: Template, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Put messages into the form that this template shows in full.

    Thinking goes into the key that the template reads, or inline where it reads think marks; where it does neither,
    the thinking is not rendered and the caller finds it missing. Tool arguments become a mapping or JSON text.

    Raises:
        RowRefused: tool arguments are broken JSON and the template needs a mapping.
    """
    return [_template_message(template, message) for message in messages]


def _template_message(template: Template, message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": message.content, **message.extra}
    if message.thinking and message.thinking.strip():
        fields = template.thinking_fields
        if fields:
            out[fields[0]] = message.thinking
        elif template.takes_inline_thinking:
            out["content"] = f"<think>\n{message.thinking}\n</think>\n\n{message.content}"
    elif "thinking" in template.thinking_fields[:1] and message.inline_thinking.strip():
        # This template reads thinking from a key only: inline marks would be shown as plain text.
        out["thinking"] = message.inline_thinking.strip("\n")
        out["content"] = message.without_thinking().content
    if message.tool_calls:
        out["tool_calls"] = [_template_call(template, call) for call in message.tool_calls]
    return out


def _template_call(template: Template, call: dict[str, Any]) -> dict[str, Any]:
    mapping_ok, text_ok = template.argument_forms
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str) and not text_ok:
        raise RowRefused("bad-tool-call", "tool call arguments are not JSON, and the template needs a mapping")
    if not isinstance(arguments, str) and text_ok and not mapping_ok:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}
