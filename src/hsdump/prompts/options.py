"""What the caller chooses about prompts, and what became of a row that gave no sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

DEFAULT_DATE = "2025-01-01"
"""What "today" is for templates that print it. Fixed, so that a run resumed tomorrow gives the same tokens."""

POLICY_REASONS = frozenset(
    {
        "control-token-in-content",
        "duplicate",
        "empty",
        "image-content",
        "no-assistant-turn",
        "no-trainable-tokens",
        "no-user-turn",
        "template-rejected",
        "thinking-refused",
        "too-long",
    }
)
"""Reasons that follow from a documented rule. Any other reason means that the data is damaged or not understood."""


SETTINGS = (
    *("max_tokens", "too_long", "turns", "thinking", "control_tokens"),
    *("text", "date", "default_system", "roles"),
)
"""Options under which samples are made that may stand in one data set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions:
    """How rows become samples. All of it changes tokens or masks, so all of it belongs in a manifest."""

    max_tokens: int = 32_768
    """Longer samples are skipped with their length, never cut."""

    vocab_size: int | None = None
    """Token ids must be below it. None: the tokenizer's own size; unchecked where there is no tokenizer."""

    turns: Literal["all", "last"] = "all"
    """Which assistant turns are learned from."""

    thinking: Literal["keep", "require", "template", "drop", "refuse"] = "keep"
    """keep: learn it, and cut the conversation where the template strips it from earlier turns; thinking that the
    template shows nowhere is counted. require: as keep, but such rows are lost. template: one sample a conversation,
    with what the template leaves of it. drop: remove it before rendering. refuse: skip rows that have any."""

    too_long: Literal["skip", "split", "cut"] = "skip"
    """skip: a sample above `max_tokens` is left out. split: the turns at its end are, until the rest fits. cut: the
    tokens above the limit are, in the middle of a turn, and what is left of the reply is learned; counted."""

    control_tokens: Literal["skip", "allow"] = "skip"
    """Rows whose text spells a control token of the tokenizer, which would become that token."""

    text: Literal["chat", "all"] = "chat"
    """Rows that are text: chats of this template, proved so; or all of it learned, as for plain text."""

    chat_template: str | None = None
    """Text of a Jinja template to use instead of the model's own."""

    date: str = DEFAULT_DATE
    """YYYY-MM-DD, for templates that print today's date."""

    default_system: str | None = None
    """System message for conversations that bring none."""

    roles: dict[str, str] = field(default_factory=dict)
    """More role names: `{"my_model_v2": "assistant"}`."""

    trust_remote_code: bool = False
    """Run tokenizer code that lies in the model's folder."""

    skip_bad_rows: bool = False
    """Damaged rows do not change the exit code of `hsdump prepare`."""

    def settings(self) -> dict[str, Any]:
        """Give what changes tokens or masks, by name; the template goes by its digest."""
        return {name: getattr(self, name) for name in SETTINGS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Skip:
    """A row, or a sample cut from one, that will not be captured."""

    source: str
    reason: str
    """A short word for machines, as in `POLICY_REASONS`."""

    detail: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", printable(self.source))
        object.__setattr__(self, "detail", printable(self.detail))

    @property
    def lost(self) -> bool:
        """Tell damage from policy: only damage changes an exit code."""
        return self.reason not in POLICY_REASONS


def printable(text: str) -> str:
    """Spell half surrogates out, which would break the terminal, the report and the index that should name them."""
    return text.encode(errors="backslashreplace").decode()


class RowRefused(Exception):
    """This row gives no sample. Becomes a `Skip` where the row's source is known; never leaves `hsdump.prompts`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail
