"""Chat templates of the field with random conversations: the learned text is the replies that they keep, nothing else.

Needs HSDUMP_REAL_FOLDER (see tests/prompts/real.py): the templates belong to their models' makers.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hsdump.prompts import Renderer
from hsdump.prompts.conversation import Message
from hsdump.prompts.masks import Layout, MaskFinder
from hsdump.prompts.options import RowRefused
from hsdump.prompts.template import template_messages

from .cases import run_cases
from .real import FOLDER_VARIABLE, control_tokens, renderer_for

FOLDER = Path(os.environ.get(FOLDER_VARIABLE, "/nowhere"))
TEMPLATES = sorted((FOLDER / "templates").glob("*.jinja"))
needs_folder = pytest.mark.skipif(not TEMPLATES, reason=f"{FOLDER_VARIABLE} names no folder with templates/")

WORDS = st.sampled_from(
    ["blue", "x = 1\n", "  ", "\n\n", "你好", "🇯🇵", "e\u0301", "\u200b", "{{ name }}", "user", "]", "None"]
)  # fmt: skip
TEXTS = st.lists(WORDS, max_size=4).map("".join)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Draw turns; each has a word of its own: S0, U0, A0, H0 (thinking) and so on."""
    messages = []
    if draw(st.booleans()):
        messages.append(Message(role="system", content="S0" + draw(TEXTS)))
    for turn in range(draw(st.integers(1, 3))):
        messages.append(Message(role="user", content=f"{draw(TEXTS)}U{turn}{draw(TEXTS)}"))
        thinking = f"H{turn}{draw(TEXTS)}" if draw(st.booleans()) else None
        messages.append(Message(role="assistant", content=f"{draw(TEXTS)}A{turn}{draw(TEXTS)}", thinking=thinking))
    return messages


@cache
def renderer_of(path: Path, scratch: Path) -> Renderer:
    return renderer_for(scratch / path.stem, path.read_text(encoding="utf-8"), control_tokens="allow")


def layout_of(renderer: Renderer, messages: list[Message]) -> Layout | str:
    """Lay out, or give the reason why not."""
    assert renderer.template is not None
    finder = MaskFinder(template=renderer.template, control_tokens=control_tokens(renderer.template.text))
    try:
        return finder.layout(template_messages(renderer.template, messages))
    except RowRefused as refused:
        return refused.reason


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real")


@needs_folder
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_replies_are_learned_and_nothing_else(path: Path, scratch: Path) -> None:
    renderer = renderer_of(path, scratch)
    control = [re.escape(token) for token in control_tokens(path.read_text(encoding="utf-8"))]
    marks = re.compile("|".join([*control, r"</?think>", r"\s+"]))
    seen: Counter[str] = Counter()

    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(messages=conversations())
    def prove(messages: list[Message]) -> None:
        layout = layout_of(renderer, messages)
        if isinstance(layout, str):
            seen[layout] += 1
            assert layout == "template-rejected"
            return
        seen[layout.strategy] += 1
        inside = [layout.text[turn.start : turn.end] for turn in layout.turns]
        outside = "".join(
            layout.text[begin:end]
            for begin, end in zip(
                [0, *(t.end for t in layout.turns)], [*(t.start for t in layout.turns), None], strict=True
            )
        )
        assert not re.search(r"[AH]\d", outside), "something that the assistant said is not learned"
        for turn, text in zip(layout.turns, inside, strict=True):
            message = messages[turn.message]
            number = int(re.findall(r"A(\d)", message.content)[0])
            assert not re.search(r"[US]\d", text), "something that somebody else said is learned"
            assert re.findall(r"[AH](\d)", text) in ([str(number)], [str(number)] * 2)
            head, content, tail = text.partition(message.content.strip())
            assert content, "the reply is not in its span as a whole"
            shown = (message.thinking or "").strip() if turn.thinking_kept else ""
            assert marks.sub("", head.replace(shown, "", 1)) == "" or is_channel(
                marks.sub("", head.replace(shown, "", 1))
            )
            assert marks.sub("", tail) == ""

    prove()
    print(dict(seen))  # noqa: T201 - with -s: how often each way of finding masks was taken
    assert set(seen) - {"template-rejected"} or "tool_use" in path.stem


def is_channel(words: str) -> bool:
    """Tell whether what is left before a reply is a channel's name, which gpt-oss writes itself."""
    return words in ("final", "analysisassistantfinal", "analysis", "assistantfinal")


TAG = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")


@needs_folder
@pytest.mark.parametrize("path", [p for p in TEMPLATES if TAG.search(p.read_text("utf-8"))], ids=lambda path: path.stem)
def test_sentinels_find_what_the_templates_own_tags_say(path: Path, scratch: Path) -> None:
    """Without its tags (but with their whitespace control) the template has the other proof only."""
    tagged = renderer_of(path, scratch)
    text = TAG.sub(
        lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", path.read_text(encoding="utf-8")
    )
    bare = renderer_for(scratch / f"{path.stem}-bare", text, control_tokens="allow")

    @settings(max_examples=100, deadline=None)
    @given(messages=conversations())
    def prove(messages: list[Message]) -> None:
        by_tags, by_sentinels = layout_of(tagged, messages), layout_of(bare, messages)
        assert isinstance(by_tags, Layout)
        assert isinstance(by_sentinels, Layout)
        assert (by_tags.strategy, by_sentinels.strategy) == ("generation", "sentinel")
        assert by_tags.text == by_sentinels.text
        assert [(t.start, t.end) for t in by_tags.turns] == [(t.start, t.end) for t in by_sentinels.turns]

    prove()


@needs_folder
def test_every_bug_case_behaves() -> None:
    assert [row for row in run_cases(FOLDER) if row[2] != "ok"] == []
