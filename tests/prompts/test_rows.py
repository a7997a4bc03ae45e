"""Shapes of rows: what each is read as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hsdump.prompts import PromptOptions, Renderer

from . import templates as t
from .helpers import LoadRenderer, chat, learned, make_model, one, skip

SYSTEM = {"role": "system", "content": "Be brief."}


def text_of(renderer: Renderer, row: Any) -> str:
    return str(renderer.tokens.decode(one(renderer, row).input_ids.tolist()))


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "Name a colour.", "input": "", "output": "Blue."},
        {"instruction": "Name a colour.", "instances": [{"input": "", "output": "Blue."}]},
        {"prompt": "Name a colour.", "completion": "Blue."},
        {"question": "Name a colour.", "answer": "Blue."},
        {"query": "Name a colour.", "response": "Blue."},
        {"conversation": [{"role": "human", "content": "Name a colour."}, {"role": "MODEL", "content": "Blue."}]},
        {"conversations": [{"from": "human", "value": "Name a colour."}], "chosen": {"from": "gpt", "value": "Blue."}},
        [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Blue."}],
        {"messages": [{"role": "user", "content": ["Name ", {"type": "text", "text": "a colour."}]},
                      {"role": "assistant", "content": [{"type": "text", "text": "Blue."}]},
                      {"role": "user", "content": "Thanks!"}]},
    ],
)  # fmt: skip
def test_all_are_the_same_conversation(load: LoadRenderer, row: Any) -> None:
    renderer = load()
    assert one(renderer, row).key == one(renderer, chat("Name a colour.", "Blue.")).key


def test_alpaca_input_system_and_history(load: LoadRenderer) -> None:
    renderer = load()
    row = {"system": "Be brief.", "history": [["a", "b"]], "instruction": "Add.", "input": "1 2", "output": "3"}
    expected = {"messages": [SYSTEM, *chat("a", "b", "Add.\n\n1 2", "3").value["messages"]]}
    assert one(renderer, row).key == one(renderer, expected).key


@pytest.mark.parametrize(
    "row",
    ["a prompt", {"turns": ["a", "b"]}, {"prompt": "def f():", "canonical_solution": "pass"}, {"instruction": "x"}],
)
def test_prompts_alone_have_nothing_to_learn(load: LoadRenderer, row: Any) -> None:
    assert skip(load(), row).reason == "no-assistant-turn"


def test_own_and_default_system_text(load: LoadRenderer) -> None:
    renderer = load(default_system="You help.")
    assert text_of(renderer, {"messages": [SYSTEM, *chat("a", "b").value["messages"]]}).count("system") == 1
    assert text_of(renderer, chat("a", "b")).startswith("<|im_start|>system\nYou help.<|im_end|>")


def test_a_mapped_role(load: LoadRenderer) -> None:
    row = {"conversations": [{"from": "user", "value": "Ping?"}, {"from": "my_model_v2", "value": "Pong."}]}
    renderer = load(roles={"my_model_v2": "assistant"})
    assert learned(renderer, one(renderer, row)) == "Pong.<|im_end|>"


def test_braces_in_text_are_text(load: LoadRenderer) -> None:
    renderer = load()
    reply = "I am {{name}}, {% for x in y %}{{ x }}{% endfor %} {# c #}"
    assert learned(renderer, one(renderer, chat(reply, reply))) == reply + "<|im_end|>"


def test_a_rendered_chat_is_taken_apart_and_proved(load: LoadRenderer) -> None:
    for template in (t.CHATML, t.TRIMMED, t.EOS_AFTER_LAST):
        renderer = load(template)
        for row in (chat("Name a colour.", "Blue."), chat("a", "b", "c", "d")):
            text = text_of(renderer, row)
            assert one(renderer, {"text": text}).key == one(renderer, row).key
    renderer = load(turns="last")
    assert learned(renderer, one(renderer, {"text": text_of(renderer, chat("a", "b", "c", "d"))})) == "d<|im_end|>"


def test_words_before_the_first_user_turn_are_context(load: LoadRenderer) -> None:
    renderer = load(t.DATED)
    text = "<|im_start|>system\nOther words.<|im_end|>\n" + text_of(load(), chat("a", "b"))
    sample = one(renderer, {"text": text})
    assert learned(renderer, sample) == "b<|im_end|>"
    assert renderer.tokens.decode(sample.input_ids.tolist()) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Once upon a time.", "no user turn of this template begins in it"),
        ("<|im_start|>user\na<|im_end|>\n", "does not end with a turn of the assistant"),
        ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb", "gives another text"),
    ],
)
def test_text_that_is_no_chat_is_refused_or_learned_whole(load: LoadRenderer, text: str, why: str) -> None:
    result = skip(load(), {"text": text})
    assert (result.reason, why in result.detail) == ("mask-not-provable", True), result
    renderer = load(text="all")
    assert learned(renderer, one(renderer, {"text": text})) == text


def test_bos_is_there_exactly_once(tmp_path: Path) -> None:
    folder = make_model(tmp_path, t.TRIMMED, bos="<|bos|>")
    renderer = Renderer.load(str(folder), PromptOptions())
    bos = renderer.tokens.backend.token_to_id("<|bos|>")
    for row in (chat("Hi", "Hello").value, {"text": "<|bos|><|turn|>user\n\nHi<|stop|><|turn|>model\n\nHello<|stop|>"}):
        ids = one(renderer, row).input_ids.tolist()
        assert (ids[0], ids.count(bos)) == (bos, 1)
    twice = Renderer.load(str(folder), PromptOptions(chat_template="{{ bos_token }}" + t.TRIMMED))
    assert skip(twice, chat("Hi", "Hello").value).reason == "two-bos"
