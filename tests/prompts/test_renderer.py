"""One row in, exact tokens and mask out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsdump.errors import InputError
from hsdump.prompts import PromptOptions, Renderer

from .helpers import LoadRenderer, chat, learned, make_model, one, skip


def test_all_turns_and_their_end_tokens_are_learned(load: LoadRenderer) -> None:
    renderer = load()
    sample = one(renderer, chat("Name a colour.", "Blue.", "Why?", "Because of the light."))
    assert learned(renderer, sample) == "Blue.<|im_end|>|Because of the light.<|im_end|>"
    assert renderer.tokens.decode(sample.input_ids.tolist()) == (
        "<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\nBlue.<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nBecause of the light.<|im_end|>\n"
    )


def test_last_turn_only(load: LoadRenderer) -> None:
    renderer = load(turns="last")
    assert learned(renderer, one(renderer, chat("a", "b", "c", "d"))) == "d<|im_end|>"


def test_digests_follow_text_and_bytes(load: LoadRenderer, model: Path, tmp_path: Path) -> None:
    renderer = load()
    assert renderer.template_digest == Renderer.load(str(model), PromptOptions()).template_digest
    assert renderer.template_digest != load("{{ messages[0].content }}").template_digest
    other = make_model(tmp_path, None, bos="<|bos|>")
    assert Renderer.load(str(other), PromptOptions()).tokenizer_digest == renderer.tokenizer_digest


@pytest.mark.parametrize(
    ("value", "reason", "detail"),
    [
        ({"messages": []}, "empty", "empty list"),
        ({"messages": [{"role": "user", "content": "Why?"}]}, "no-assistant-turn", "nothing to learn"),
        ({"conversations": [{"from": "elf", "value": "hi"}]}, "unknown-role", "--role elf=assistant"),
        ({"body": "x", "title": "y"}, "unknown-shape", "the row's keys are: body, title"),
        (7, "unknown-shape", "the row is int"),
        ({"messages": [{"role": "assistant", "content": " \n"}]}, "no-trainable-tokens", "is empty"),
        ({"input_ids": []}, "empty", "input_ids is empty"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "length-mismatch", "2 input_ids but 1"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "no-trainable-tokens", "all zero"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "bad-token-row", "other than 0 and 1"),
        ({"input_ids": [1, 99_999]}, "token-outside-vocabulary", "token id 99999"),
        ({"input_ids": [-1, 5]}, "token-outside-vocabulary", "token id -1"),
        ({"input_ids": ["a"]}, "bad-token-row", "not a flat list of integers"),
    ],
)
def test_rows_that_give_no_sample_say_why(load: LoadRenderer, value: Any, reason: str, detail: str) -> None:
    result = skip(load(), value)
    assert (result.reason, detail in result.detail) == (reason, True), result


def test_longer_than_the_limit_is_skipped_whole(load: LoadRenderer) -> None:
    result = skip(load(max_tokens=8), chat("Name a colour.", "Blue.").value)
    assert result.reason == "too-long"
    assert "the limit is 8 (--max-tokens)" in result.detail


def test_tokenized_rows_are_kept_as_they_are(load: LoadRenderer) -> None:
    sample = one(load(), {"id": "t", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]})
    assert (sample.source, sample.input_ids.tolist(), sample.loss_mask.tolist()) == ("t", [5, 6, 7], [0, 1, 1])
    assert np.all(one(load(), {"input_ids": [5, 6, 7]}).loss_mask == 1)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tokenizer can be loaded from"):
        Renderer.load(str(tmp_path), PromptOptions())


def test_messages_without_a_template_are_an_error_and_tokens_are_not(tmp_path: Path) -> None:
    renderer = Renderer.load(str(make_model(tmp_path, None)), PromptOptions())
    assert one(renderer, {"input_ids": [5, 6]}).input_ids.tolist() == [5, 6]
    with pytest.raises(InputError, match="no chat template"):
        renderer.sample(chat("a", "b"))
