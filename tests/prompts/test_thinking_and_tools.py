"""Thinking that templates strip or move, and tool calls in the forms of the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hsdump.prompts import Renderer
from hsdump.prompts.row import Row

from . import templates as t
from .helpers import LoadRenderer, chat, learned, one, skip

INLINE = chat("UQ1", "<think>\nTH1\n</think>\n\nANS1", "UQ2", "<think>\nTH2\n</think>\n\nANS2")
FIELD = Row(
    source="rows.jsonl:1",
    value={
        "id": "f",
        "messages": [
            {"role": "user", "content": "UQ1"},
            {"role": "assistant", "content": "ANS1", "reasoning_content": "TH1"},
            {"role": "user", "content": "UQ2"},
            {"role": "assistant", "content": "ANS2", "reasoning_content": "TH2"},
        ],
    },
)


def all_learned(renderer: Renderer, row: Row) -> list[str]:
    outcome = renderer.outcome(row)
    assert outcome.skips == ()
    return [learned(renderer, sample) for sample in outcome.samples]


@pytest.mark.parametrize("row", [INLINE, FIELD], ids=["inline", "field"])
def test_a_conversation_is_cut_where_thinking_is_stripped(load: LoadRenderer, row: Row) -> None:
    renderer = load(t.THINK_STRIPPED)
    outcome = renderer.outcome(row)
    assert [learned(renderer, sample) for sample in outcome.samples] == [
        "<think>\nTH1\n</think>\n\nANS1<|im_end|>",
        "<think>\nTH2\n</think>\n\nANS2<|im_end|>",
    ]
    assert [sample.source.partition("#")[2] for sample in outcome.samples] == ["turn1", "turn3"]
    assert outcome.notes["rows-cut-at-turns"] == 1
    second = renderer.tokens.decode(outcome.samples[1].input_ids.tolist())
    assert "ANS1" in second
    assert "TH1" not in second


def test_thinking_as_the_template_leaves_it(load: LoadRenderer) -> None:
    renderer = load(t.THINK_STRIPPED, thinking="template")
    assert all_learned(renderer, INLINE) == ["ANS1<|im_end|>|<think>\nTH2\n</think>\n\nANS2<|im_end|>"]


def test_thinking_dropped_or_refused(load: LoadRenderer) -> None:
    dropped = load(t.THINK_STRIPPED, thinking="drop")
    assert all_learned(dropped, INLINE) == all_learned(dropped, FIELD) == ["ANS1<|im_end|>|ANS2<|im_end|>"]
    result = skip(load(t.THINK_STRIPPED, thinking="refuse"), FIELD.value)
    assert (result.reason, result.lost) == ("thinking-refused", False)
    assert one(load(t.THINK_STRIPPED, thinking="refuse"), chat("a", "b"))


def test_a_plain_chat_is_one_sample_although_no_prefix_holds(load: LoadRenderer) -> None:
    renderer = load(t.THINK_STRIPPED)
    assert all_learned(renderer, chat("a", "AQ1", "b", "AQ2")) == ["AQ1<|im_end|>|AQ2<|im_end|>"]


def test_the_generation_prompts_part_of_the_thinking_is_not_learned(load: LoadRenderer) -> None:
    renderer = load(t.THINK_PROMPTED)
    turns = ["TH1\n</think>\n\nANS1<|stop|>", "TH2\n</think>\n\nANS2<|stop|>"]
    assert all_learned(renderer, FIELD) == turns
    # Inline, this template keeps it in every turn: no need to cut.
    assert all_learned(renderer, INLINE) == ["|".join(turns)]
    assert all_learned(renderer, chat("a", "AQ1", "b", "AQ2")) == ["AQ1<|stop|>|AQ2<|stop|>"]


@pytest.mark.parametrize("row", [INLINE, FIELD], ids=["inline", "field"])
def test_thinking_goes_into_the_key_that_the_template_reads(load: LoadRenderer, row: Row) -> None:
    renderer = load(t.CHANNELS)
    assert all_learned(renderer, row) == [
        "<|obs|>TH1<|im_end|><|turn|>assistant<|call|>ANS1<|stop|>",
        "<|obs|>TH2<|im_end|><|turn|>assistant<|call|>ANS2<|stop|>",
    ]


@pytest.mark.parametrize("row", [INLINE, FIELD], ids=["inline", "field"])
def test_thinking_that_no_rendering_shows_is_counted_or_refused(load: LoadRenderer, row: Row) -> None:
    renderer = load(t.THINK_DROPPED)
    outcome = renderer.outcome(row)
    assert len(outcome.samples) == 1
    assert outcome.notes["thinking-lost"] == 2
    assert "TH" not in renderer.tokens.decode(outcome.samples[0].input_ids.tolist())
    result = skip(load(t.THINK_DROPPED, thinking="require"), row.value)
    assert (result.reason, result.lost) == ("thinking-lost", True)


def test_reasoning_parts_are_thinking(load: LoadRenderer) -> None:
    parts = [{"type": "reasoning", "value": "easy"}, {"type": "text", "value": "4"}]
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "value": "2+2?"}]},
            {"role": "assistant", "content": parts},
        ]
    }
    renderer = load(t.THINK_STRIPPED)
    assert learned(renderer, one(renderer, row)) == "<think>\neasy\n</think>\n\n4<|im_end|>"


def test_split_keeps_the_turns_that_fit(load: LoadRenderer) -> None:
    row = chat("a", "b", "c", "word " * 50)
    whole = load().outcome(row).samples[0]
    renderer = load(max_tokens=len(whole.input_ids) - 1, too_long="split")
    outcome = renderer.outcome(row)
    assert [(skip.source, skip.reason) for skip in outcome.skips] == [("rows.jsonl:1", "too-long")]
    (sample,) = outcome.samples
    assert (sample.source, learned(renderer, sample)) == ("rows.jsonl:1#turn1", "b<|im_end|>")


def calling(arguments: Any, content: Any = "") -> dict[str, Any]:
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "USERTEXT"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "weather", "content": "SECRET 4C"},
            {"role": "assistant", "content": "It is 4C."},
        ]
    }


@pytest.mark.parametrize("content", ["", None])
@pytest.mark.parametrize("arguments", [{"city": "Oslo"}, '{"city": "Oslo"}'], ids=["mapping", "text"])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (t.CALLS_NEED_MAPPING, "<|call|>weather city=Oslo<|im_end|>|It is 4C.<|im_end|>"),
        (t.CALLS_NEED_TEXT, '<|call|>weather {"city": "Oslo"}<|im_end|>|It is 4C.<|im_end|>'),
        (t.CALLS_ESCAPE_TEXT, '<|call|>weather {"city": "Oslo"}<|im_end|>|It is 4C.<|im_end|>'),
        (t.CALLS_AND_EMPTY_REPLY, '<|call|>weather {"city": "Oslo"}<|stop|>|It is 4C.<|stop|>'),
    ],
    ids=["needs-mapping", "needs-text", "escapes-text", "tells-null"],
)
def test_calls_are_learned_once_escaped_and_results_are_not(
    load: LoadRenderer, template: str, expected: str, arguments: Any, content: Any
) -> None:
    renderer = load(template)
    sample = one(renderer, calling(arguments, content))
    assert learned(renderer, sample) == expected
    assert "None" not in renderer.tokens.decode(sample.input_ids.tolist())


def test_broken_arguments_are_shown_or_refused(load: LoadRenderer) -> None:
    broken = '{"city": "Os'
    renderer = load(t.CALLS_NEED_TEXT)
    assert learned(renderer, one(renderer, calling(broken))).startswith('<|call|>weather {"city": "Os<|im_end|>')
    for template in (t.CALLS_NEED_MAPPING, t.CALLS_ESCAPE_TEXT):
        result = skip(load(template), calling(broken))
        assert (result.reason, result.lost) == ("bad-tool-call", True)
        assert "tool call arguments are not JSON" in result.detail


def test_calls_that_the_template_does_not_know_are_counted(load: LoadRenderer) -> None:
    renderer = load(t.NO_CALLS)
    outcome = renderer.outcome(Row(source="r", value=calling({"city": "Oslo"})))
    assert outcome.notes["tool-calls-lost"] == 1
    assert learned(renderer, outcome.samples[0]) == "It is 4C.<|im_end|>"


def test_a_call_after_a_result_has_no_header_in_it(load: LoadRenderer) -> None:
    row = calling({"city": "Oslo"})
    row["messages"] = [*row["messages"][:3], *row["messages"][1:3], row["messages"][3]]
    renderer = load(t.RESULTS_END_TWO_WAYS)
    call = '<|call|>weather {"city": "Oslo"}<|im_end|>'
    assert learned(renderer, one(renderer, row)) == f"{call}|{call}|It is 4C.<|im_end|>"


def test_a_turn_that_is_not_shown_does_not_hide_the_others(load: LoadRenderer) -> None:
    row = chat("a", "b", "c", "d").value
    row["messages"].insert(2, calling({})["messages"][1])
    renderer = load(t.CHATML_WITHOUT_EMPTY)
    outcome = renderer.outcome(Row(source="r", value=row))
    assert learned(renderer, outcome.samples[0]) == "b<|im_end|>|d<|im_end|>"
    assert outcome.notes["tool-calls-lost"] == 1


def test_control_tokens_in_arguments_and_tools_are_found(load: LoadRenderer) -> None:
    renderer = load(t.CALLS_ESCAPE_TEXT)
    assert skip(renderer, calling({"city": "<|stop|>"})).reason == "control-token-in-content"
    tool = {"type": "function", "function": {"name": "f", "description": "<|stop|>"}}
    assert "tools spells the control token" in skip(renderer, {"tools": [tool], **chat("a", "b").value}).detail


def test_function_call_turns_and_tools_as_json_text(load: LoadRenderer) -> None:
    tool = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}
    turns = [
        {"from": "human", "value": "Oslo?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"from": "observation", "value": "4C"},
        {"from": "gpt", "value": "It is 4C."},
    ]
    renderer = load(t.CALLS_ESCAPE_TEXT)
    as_text = one(renderer, {"conversations": turns, "tools": json.dumps([tool])})
    as_list = one(renderer, {"conversations": turns, "tools": [{"type": "function", "function": tool}]})
    assert learned(renderer, as_text) == '<|call|>weather {"city": "Oslo"}<|im_end|>|It is 4C.<|im_end|>'
    assert as_text.key == as_list.key
    without = one(renderer, {"conversations": turns, "tools": []})
    assert without.key == one(renderer, {"conversations": turns}).key != as_text.key


@pytest.mark.parametrize(
    ("turn", "reason", "detail"),
    [
        ({"from": "function_call", "value": "weather(Oslo)"}, "bad-tool-call", "the tool call is not JSON"),
        ({"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, "bad-tool-call", "without a function name"),
        ({"role": "assistant", "content": [{"type": "chart", "text": "x"}]}, "unknown-part", "'chart'"),
        ({"role": "assistant", "content": 7}, "unknown-part", "content of type int"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "image-content", "image content is not supported"),
        ({"role": "user", "content": "", "tool_calls": [{"name": "f"}]}, "unknown-shape", "tool calls but role"),
        ("hello", "unknown-shape", "turn 1 is str"),
    ],
)
def test_turns_that_are_not_understood(load: LoadRenderer, turn: Any, reason: str, detail: str) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, turn, {"role": "assistant", "content": "b"}]}
    result = skip(load(), row)
    assert result.reason == reason
    assert detail in result.detail


def test_images_beside_the_text_are_refused(load: LoadRenderer) -> None:
    row = {"image": "x.png", **chat("<image>\nWhat?", "A cat.").value}
    assert (skip(load(), row).reason, skip(load(), row).lost) == ("image-content", False)
    assert one(load(), {**row, "image": None})


def test_tools_that_are_no_list_are_refused(load: LoadRenderer) -> None:
    for tools in ("{broken", {"name": "f"}, "3"):
        assert skip(load(), {"tools": tools, **chat("a", "b").value}).reason == "bad-tools"
