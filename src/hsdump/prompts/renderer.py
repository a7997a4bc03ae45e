"""Rows to samples: the tokenizer, the template and the masks of one model together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsdump.arrays import xxh3
from hsdump.errors import InputError, UsageError
from hsdump.prompts.conversation import THINK_CLOSE, THINK_OPEN, Conversation, Message, TextRow, TokenRow
from hsdump.prompts.masks import Layout, MaskFinder, TurnSpan
from hsdump.prompts.options import PromptOptions, RowRefused, Skip, printable
from hsdump.prompts.preformatted import ChatText
from hsdump.prompts.row import Row
from hsdump.prompts.rows import ROLES, parse_row
from hsdump.prompts.template import Template, template_messages
from hsdump.prompts.tokenrows import token_sample
from hsdump.prompts.tokens import FastTokens, Tokens, load_tokenizer, tokenizer_digest
from hsdump.samples import TokenSample


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one row became."""

    samples: tuple[TokenSample, ...] = ()
    strategies: tuple[str, ...] = ()
    """How each sample's mask was found: a `Strategy`, or `given` for tokenized rows."""

    skips: tuple[Skip, ...] = ()
    row_id: str | None = None
    """The row's own id, where it has one."""

    notes: Counter[str] = field(default_factory=Counter)
    """Things worth a line in the report: `shape:messages`, `mask:sentinel`, `thinking-lost`, `tokens-straddling`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AskedTokens:
    """A conversation up to where the target is to answer."""

    input_ids: NDArray[np.int64]
    """[S] with the template's generation prompt at the end."""

    opens_thinking: str
    """What the generation prompt writes from an open think mark on, such as `<think>\\n`: the answer begins inside."""


@dataclass(kw_only=True)
class Renderer:
    """Owns one tokenizer and one template. Cheap to share between rows, not between threads."""

    tokens: Tokens
    template: Template | None
    tools_template: Template | None
    """For rows with tools, where the model has a template of its own for them; else the same."""

    options: PromptOptions
    tokenizer_digest: str
    """xxh3 of the tokenizer's files."""

    vocab_size: int
    bos_id: int | None
    bos_token: str | None

    def __post_init__(self) -> None:
        self._finder, self._tools_finder = (
            MaskFinder(template=template, control_tokens=self.tokens.added) if template else None
            for template in (self.template, self.tools_template)
        )
        self._chat_text = ChatText(finder=self._finder) if self._finder else None
        # Every one is a piece of text that would become a single token wherever it stands.
        self._control = tuple(text for text in self.tokens.special.values() if text.strip())

    @classmethod
    def load(cls, model_path: str, options: PromptOptions) -> Renderer:
        """Read tokenizer and template of a model; the weights are not touched.

        Raises:
            InputError: no tokenizer there, or one without character offsets.
            UsageError: an option that cannot be, such as a date that is none.
        """
        tokenizer, tokens = load_tokenizer(model_path, trust_remote_code=options.trust_remote_code)
        date = _date(options.date)
        for name, role in options.roles.items():
            if role not in set(ROLES.values()):
                known = ", ".join(sorted(set(ROLES.values())))
                raise UsageError(f"role {name!r} is mapped to {role!r}", f"map it to one of {known}")
        texts = (options.chat_template,) * 2 if options.chat_template else _template_texts(tokenizer)
        special = {name: str(value) for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
        template, tools_template = (
            Template(text=text, special_tokens=special, date=date) if text else None for text in texts
        )
        return cls(
            tokens=tokens,
            template=template,
            tools_template=tools_template,
            options=options,
            tokenizer_digest=tokenizer_digest(model_path, tokens),
            # Ids may have gaps, so the number of tokens is not the bound.
            vocab_size=options.vocab_size or max([len(tokenizer) - 1, *tokenizer.get_vocab().values()]) + 1,
            bos_id=tokenizer.bos_token_id,
            bos_token=tokenizer.bos_token,
        )

    @property
    def template_digest(self) -> str:
        """xxh3 of the template's text; of nothing when the model has none."""
        texts = dict.fromkeys(template.text for template in (self.template, self.tools_template) if template)
        return xxh3(*(text.encode() for text in texts))

    @property
    def date(self) -> str:
        """What "today" is in every prompt."""
        return self.options.date

    @property
    def can_travel(self) -> bool:
        """True when other processes can have a copy; a tokenizer that runs the model's own code cannot be sent."""
        return isinstance(self.tokens, FastTokens)

    def ask(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> AskedTokens:
        """Render a conversation that the assistant is to go on with, and tokenize it once.

        Raises:
            RowRefused: the template does not take these messages.
            InputError: the model has no chat template.
        """
        template = self._finder_for(tools).template
        shown = template_messages(template, messages)
        text = template.render(shown, tools, generation_prompt=True)
        before = template.render(shown, tools)
        _, mark, rest = (text.removeprefix(before) if text.startswith(before) else "").rpartition(THINK_OPEN)
        input_ids, _ = self.tokens.encode(text, add_special_tokens=False)
        self._check_ids(input_ids)
        opens = bool(mark) and THINK_CLOSE not in rest
        return AskedTokens(input_ids=input_ids, opens_thinking=mark + rest if opens else "")

    def check_text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        """Refuse text that no tokenizer takes, or that would become control tokens.

        Raises:
            RowRefused: it does.
        """
        self._check_text(Conversation(messages=tuple(messages), tools=tuple(map(dict, tools))))

    def sample(self, row: Row) -> list[TokenSample] | Skip:
        """Make the samples of one row; several when thinking makes it be cut."""
        outcome = self.outcome(row)
        return list(outcome.samples) if outcome.samples else outcome.skips[0]

    def outcome(self, row: Row) -> Outcome:
        """Make the samples of one row, with everything that the report should say about it.

        Raises:
            InputError: the row needs a chat template and there is none.
        """
        notes: Counter[str] = Counter()
        source = row_source(row)
        try:
            shape, parsed = parse_row(row.value, self.options)
            notes[f"shape:{shape}"] += 1
            if isinstance(parsed, TokenRow):
                sample = token_sample(parsed, source=source, vocab_size=self.vocab_size, options=self.options)
                return Outcome(samples=(sample,), strategies=("given",), notes=notes)
            if isinstance(parsed, TextRow):
                return self._text(source, parsed.text, notes)
            return self._conversation(source, parsed, notes)
        except RowRefused as refused:
            skip = Skip(source=source, reason=refused.reason, detail=refused.detail)
            return Outcome(skips=(skip,), notes=notes)

    def _text(self, source: str, text: str, notes: Counter[str]) -> Outcome:
        """Take text as it is: as a chat of this template, or as a whole."""
        check_encodable("the text", text)
        if self.options.text == "all":
            turns: tuple[TurnSpan, ...] = (whole_text(text),)
            layout = Layout(text=text, turns=turns, strategy="all")
        elif self._chat_text is None:
            raise RowRefused("mask-not-provable", "the row is text and the model has no chat template; --text all")
        else:
            layout = self._chat_text.layout(text)
            turns = layout.turns if self.options.turns == "all" else layout.turns[-1:]
        notes[f"mask:{layout.strategy}"] += 1
        sample = self._tokens(source, layout, turns, notes, bos=True)
        return Outcome(samples=(sample,), strategies=(layout.strategy,), notes=+notes)

    def _conversation(self, source: str, conversation: Conversation, notes: Counter[str]) -> Outcome:
        messages = self._thinking_policy(conversation.messages)
        self._check_text(replace(conversation, messages=messages))
        made: list[tuple[TokenSample, str]] = []
        skips: list[Skip] = []
        learned = conversation.learned_turns()
        open_turns = set(learned if self.options.turns == "all" else learned[-1:])
        whole = True
        while open_turns:
            last = max(open_turns)
            layout, turns = self._layout(messages[: last + 1], conversation.tools, open_turns)
            done = {turn.message for turn in turns}
            whole = whole and done == open_turns
            part = source if whole else f"{source}#turn{last}"
            try:
                made.append((self._tokens(part, layout, turns, notes), layout.strategy))
            except RowRefused as refused:
                skips.append(Skip(source=part, reason=refused.reason, detail=refused.detail))
                if refused.reason == "too-long" and self.options.too_long == "split":
                    done, whole = {last}, False
            else:
                self._note(layout, turns, notes)
            open_turns -= done
        if len(made) > 1:
            notes["rows-cut-at-turns"] += 1
        samples, strategies = tuple(sample for sample, _ in made[::-1]), tuple(name for _, name in made[::-1])
        return Outcome(samples=samples, strategies=strategies, skips=tuple(skips), notes=+notes)

    def _note(self, layout: Layout, turns: Sequence[TurnSpan], notes: Counter[str]) -> None:
        notes[f"mask:{layout.strategy}"] += 1
        notes["thinking-lost"] += sum(not turn.thinking_kept for turn in turns)
        notes["tool-calls-lost"] += sum(not turn.calls_kept for turn in turns)
        notes["turns-altered"] += sum(turn.altered for turn in turns)

    def _layout(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], open_turns: set[int]
    ) -> tuple[Layout, list[TurnSpan]]:
        """Lay a conversation out and choose the turns that are learned from this rendering.

        The last turn is always among them: no other rendering would show more of it. An earlier turn whose thinking is
        left out here waits for a rendering that ends with it, unless the template shows thinking nowhere.
        """
        finder = self._finder_for(tools)
        template = finder.template
        layout = finder.layout(template_messages(template, messages), tools)
        turns = [turn for turn in layout.turns if turn.message in open_turns]
        if self.options.thinking != "template" and turns[-1].thinking_kept and template.shows_thinking:
            turns = [turn for turn in turns if turn.thinking_kept]
        lost = [turn.message for turn in turns if not turn.thinking_kept]
        if lost and self.options.thinking == "require":
            detail = f"the template shows no thinking in turn {lost[0]}, and --thinking require was given"
            raise RowRefused("thinking-lost", detail)
        return layout, turns

    def _finder_for(self, tools: Sequence[Mapping[str, Any]]) -> MaskFinder:
        finder = self._tools_finder if tools else self._finder
        if finder is None:
            raise InputError(
                "the model has no chat template, and a row holds messages",
                "pass --chat-template FILE, or rows that have input_ids already",
            )
        return finder

    def _tokens(
        self, source: str, layout: Layout, turns: Sequence[TurnSpan], notes: Counter[str], *, bos: bool = False
    ) -> TokenSample:
        # A template writes BOS itself if its model wants one; text that brings none gets what the tokenizer adds.
        add = bos and not (self.bos_token and layout.text.startswith(self.bos_token))
        input_ids, offsets = self.tokens.encode(layout.text, add_special_tokens=add)
        if len(input_ids) > self.options.max_tokens and self.options.too_long == "cut":
            notes["samples-cut-at-limit"] += 1
            input_ids, offsets = input_ids[: self.options.max_tokens], offsets[: self.options.max_tokens]
        loss_mask, straddling = mask_tokens(offsets, turns)
        notes["tokens-straddling"] += straddling
        check_length(len(input_ids), self.options)
        self._check_ids(input_ids)
        if not loss_mask.any():
            raise RowRefused("no-trainable-tokens", "no token of the assistant is left to learn from")
        return TokenSample.make(source, input_ids, loss_mask)

    def _check_ids(self, input_ids: NDArray[np.int64]) -> None:
        if self.bos_id is not None and list(input_ids[:2]) == [self.bos_id] * 2:
            raise RowRefused("two-bos", f"the text begins with two BOS tokens (id {self.bos_id})")
        if len(input_ids) and int(input_ids.max()) >= self.vocab_size:
            detail = f"token id {int(input_ids.max())} of a vocabulary of {self.vocab_size}"
            raise RowRefused("token-outside-vocabulary", detail)

    def _thinking_policy(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        policy = self.options.thinking
        if policy == "drop":
            return tuple(m.without_thinking() if m.role == "assistant" else m for m in messages)
        if policy == "refuse" and any(message.has_thinking for message in messages):
            raise RowRefused("thinking-refused", "the row has thinking, and --thinking refuse was given")
        return messages

    def _check_text(self, conversation: Conversation) -> None:
        """Refuse text that no tokenizer takes, or that would become control tokens."""
        for index, message in enumerate(conversation.messages):
            calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.tool_calls]
            for text in (message.content, message.thinking or "", *calls):
                check_encodable(f"turn {index}", text)
                self._check_control(f"turn {index}", text)
        if conversation.tools:
            tools = json.dumps(conversation.tools, ensure_ascii=False)
            check_encodable("tools", tools)
            self._check_control("tools", tools)

    def _check_control(self, where: str, text: str) -> None:
        if self.options.control_tokens == "skip":
            token = next((token for token in self._control if token in text), None)
            if token is not None:
                detail = f"{where} spells the control token {token!r}; --control-tokens allow keeps it"
                raise RowRefused("control-token-in-content", detail)


def check_encodable(what: str, text: str) -> None:
    """Refuse half a surrogate pair: legal in JSON, but no text that a tokenizer or a server can take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        detail = f"{what} has half a surrogate pair (\\u{ord(text[error.start]):04x}) at character {error.start}"
        raise RowRefused("lone-surrogate", detail) from error


def whole_text(text: str) -> TurnSpan:
    """Cover a text that is learned from end to end."""
    return TurnSpan(message=0, start=0, end=len(text), thinking_kept=True, calls_kept=True, altered=False)


def mask_tokens(offsets: NDArray[np.int64], turns: Sequence[TurnSpan]) -> tuple[NDArray[np.uint8], int]:
    """Turn character spans into a token mask.

    Letters: S = tokens.

    Args:
        offsets: int64 [S, 2] character range of each token, from the tokenizer itself.
        turns: spans to learn.

    Returns:
        uint8 [S], 1 where a token lies wholly inside one span, and how many tokens lie across an edge. Those are
        counted out: part of their text is not the assistant's.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    mask = np.zeros(len(offsets), dtype=np.uint8)
    straddling = 0
    for turn in turns:
        inside = (starts >= turn.start) & (ends <= turn.end) & (ends > starts)
        touching = (starts < turn.end) & (ends > turn.start) & (ends > starts) & ~inside
        mask[inside] = 1
        straddling += int(touching.sum())
    return mask, straddling


def check_length(num_tokens: int, options: PromptOptions) -> None:
    """Refuse what is longer than the limit; nothing is ever cut."""
    if num_tokens > options.max_tokens:
        raise RowRefused("too-long", f"{num_tokens} tokens, the limit is {options.max_tokens} (--max-tokens)")


def row_source(row: Row) -> str:
    """Name a row for people: its own id where it has one, else the place in the file."""
    return own_id(row) or printable(row.source)


def own_id(row: Row) -> str | None:
    """Give the id that a row brings along."""
    if isinstance(row.value, Mapping):
        # `source` is what `hsdump prepare` writes; in other files it tends to name the collection.
        keys = ("source", "id") if "input_ids" in row.value else ("id", "conversation_id")
        for key in keys:
            value = row.value.get(key)
            if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
                return printable(str(value))
    return None


def _template_texts(tokenizer: Any) -> tuple[str | None, str | None]:
    """Give the template for rows without and with tools, chosen as transformers chooses."""
    template = tokenizer.chat_template
    if not isinstance(template, dict):
        return template or None, template or None
    default = template.get("default") or next(iter(template.values()), None)
    return default, template.get("tool_use") or default


def _date(text: str) -> datetime:
    try:
        return datetime.strptime(text, "%Y-%m-%d")  # noqa: DTZ007 - a day in a prompt, no moment in time
    except ValueError as error:
        raise UsageError(f"--date {text!r} is no date", "write it as YYYY-MM-DD") from error
