"""Shapes of rows: what each is read as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hsdump.prompts import PromptOptions, Renderer
from hsdump.prompts.row import Row

from . import templates as t
from .helpers import LoadRenderer, chat, learned, make_model, one, skip

KEYS = st.sampled_from(
    ["messages", "conversations", "role", "from", "value", "content", "type", "text", "tool_calls", "function", "name",
     "arguments", "tools", "input_ids", "loss_mask", "prompt", "completion", "instruction", "output", "instances", "id",
     "\ud800", "history", "turns", "chosen", "system", "reasoning_content", "function_call", "weight", "images"]
)  # fmt: skip
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


@pytest.mark.parametrize("off", [{"weight": 0}, {"loss_weight": 0.0}, {"train": False}])
def test_turns_that_the_data_takes_out_are_context(load: LoadRenderer, off: dict[str, Any]) -> None:
    row = chat("a", "b", "c", "d").value
    row["messages"][1] |= off
    row["messages"][3]["loss_weight"] = 0.5
    renderer = load()
    assert learned(renderer, one(renderer, row)) == "d<|im_end|>"
    row["messages"][3] |= off
    assert skip(renderer, row).reason == "no-trainable-tokens"


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    folder = make_model(tmp_path, None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": t.CHATML},
        {"name": "tool_use", "template": t.CALLS_ESCAPE_TEXT},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    renderer = Renderer.load(str(folder), PromptOptions())
    tool = {"type": "function", "function": {"name": "f"}}
    assert text_of(renderer, {"tools": [tool], **chat("a", "b").value}).startswith("<|obs|>[{")
    assert text_of(renderer, chat("a", "b")).startswith("<|im_start|>user")
    single = Renderer.load(str(folder), PromptOptions(chat_template=t.CHATML))
    assert single.template_digest != renderer.template_digest


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["assistant", "user"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=JSON | st.fixed_dictionaries({"messages": st.lists(st.dictionaries(KEYS, JSON), max_size=4)}))
def test_whatever_json_holds_becomes_a_sample_or_a_named_skip(load: LoadRenderer, value: Any) -> None:
    if "r" not in _RENDERER:
        _RENDERER["r"] = load(t.CALLS_ESCAPE_TEXT)
    outcome = _RENDERER["r"].outcome(Row(source="r", value=value))
    assert outcome.samples or outcome.skips
    assert all((skip.source + skip.detail).encode() for skip in outcome.skips)


def test_half_surrogates_in_keys_and_names_are_spelled_out(load: LoadRenderer) -> None:
    result = skip(load(), {"\ud800key": 1, "id": "\udfff"})
    assert (result.source, "\\ud800key" in result.detail) == ("\\udfff", True)


_RENDERER: dict[str, Renderer] = {}
