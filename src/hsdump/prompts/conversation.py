"""A conversation in one shape, whatever the file called its parts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn. `content` is always text; what templates need beyond it rides in `extra`."""

    role: Role
    content: str

    thinking: str | None = None
    """Reasoning that the data keeps apart from the content. Thinking inside the content stays there."""

    tool_calls: tuple[dict[str, Any], ...] = ()
    """OpenAI's form; `arguments` is a mapping, or text where the data's JSON is broken."""

    learn: bool = True
    """False where the data itself says that this turn carries no loss."""

    extra: dict[str, Any] = field(default_factory=dict)
    """`name`, `tool_call_id`."""

    @property
    def has_thinking(self) -> bool:
        if self.role != "assistant":
            return False
        return bool(self.thinking and self.thinking.strip()) or bool(self.inline_thinking.strip())

    @property
    def inline_thinking(self) -> str:
        """The text between the think marks inside the content, or nothing."""
        before, close, _ = self.content.rpartition(THINK_CLOSE)
        return before.rpartition(THINK_OPEN)[2] if close else ""

    @property
    def is_blank(self) -> bool:
        return not (self.content.strip() or self.tool_calls or (self.thinking and self.thinking.strip()))

    def without_thinking(self) -> Message:
        """Drop reasoning of either form, and the line breaks that set it apart."""
        before, close, after = self.content.rpartition(THINK_CLOSE)
        if close:
            lead = before.rpartition(THINK_OPEN)[0] if THINK_OPEN in before else ""
            return replace(self, thinking=None, content=lead + after.lstrip("\n"))
        return replace(self, thinking=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()

    def learned_turns(self) -> list[int]:
        """Give the places of the assistant's turns, without those that the data takes out."""
        return [index for index, m in enumerate(self.messages) if m.role == "assistant" and m.learn]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRow:
    """A row that somebody tokenized already."""

    input_ids: Any
    loss_mask: Any
    """None: every token is learned from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRow:
    """A row that is text already: a chat as the template writes it, or plain text."""

    text: str
