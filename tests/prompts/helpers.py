"""A real fast tokenizer, made here, and what many tests ask of a sample."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hsdump.prompts import Renderer, Skip
from hsdump.prompts.row import Row
from hsdump.samples import TokenSample

from .templates import CONTROL_TOKENS

_CORPUS = (
    "Name a colour. Blue. The sea is blue because water takes the red part of the light.",
    "def add(a, b):\n    return a + b\n",
    "Wie heißt die Hauptstadt von Norwegen? Oslo. 你好，世界。 Привет, мир!",
    "user assistant system tool think answer question hello hello hello world world",
)


def make_model(folder: Path, template: str | None, *, bos: str | None = None) -> Path:
    """Write a tokenizer of 600 byte-level tokens and a template: all that the prompts part reads of a model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    if bos:
        config["bos_token"] = bos
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


LoadRenderer = Callable[..., Renderer]


def learned(renderer: Renderer, sample: TokenSample) -> str:
    """Decode the learned tokens; runs are set apart by a bar."""
    runs: list[list[int]] = [[]]
    for token, keep in zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True):
        if keep:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return "|".join(renderer.tokens.decode(run) for run in runs if run)


def chat(*contents: str) -> Row:
    """Make a row of alternating user and assistant turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return Row(source="rows.jsonl:1", value={"messages": messages})


def one(renderer: Renderer, row: Row | dict[str, Any]) -> TokenSample:
    result = renderer.sample(row if isinstance(row, Row) else Row(source="rows.jsonl:1", value=row))
    assert not isinstance(result, Skip), result
    assert len(result) == 1
    return result[0]


def skip(renderer: Renderer, value: Any) -> Skip:
    result = renderer.sample(Row(source="rows.jsonl:1", value=value))
    assert isinstance(result, Skip), result
    return result
