"""Templates of the field with a tokenizer that knows their control tokens: enough of a model for the prompts part."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hsdump.prompts import PromptOptions, Renderer

FOLDER_VARIABLE = "HSDUMP_REAL_FOLDER"
"""Names a folder with `templates/`, `data/` and `cases.jsonl`: other people's work, so not in this repository."""

_CONTROL = re.compile(
    r"<[|｜][^|｜<>{}\s]{1,40}[|｜]>|<(?:start|end)_of_turn>|</?s>"
    r"|\[/?INST\]|\[/?[A-Z_]{4,24}\]|\]~!?b[\[\]]|\[e~\["
)
_BOS = ("<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<bos>", "<s>", "[gMASK]")
_CORPUS = (
    "Name a colour. Blue. The sea is blue. 1 + 1 = 2. user assistant system tool",
    "你好 Привет def f(x):\n    return x",
)


@cache
def control_tokens(template: str) -> tuple[str, ...]:
    """Give what looks like a control token in a template's text."""
    return tuple(dict.fromkeys([*_CONTROL.findall(template), "<|endoftext|>"]))


def model_for(folder: Path, template: str) -> Path:
    """Write a byte-level tokenizer with the template's control tokens, and the template."""
    bos = next((token for token in _BOS if token in template), None)
    if bos is None and "bos_token" in template:
        bos = "<|begin_of_text|>" if "start_header_id" in template else "<bos>"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = list(dict.fromkeys([*([bos] if bos else []), *control_tokens(template)]))
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    config["eos_token"] = next((token for token in special if token not in _BOS), special[-1])
    if bos:
        config["bos_token"] = bos
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def renderer_for(folder: Path, template: str, **options: Any) -> Renderer:
    """Load such a model, made first if it is not there."""
    if not (folder / "tokenizer_config.json").exists():
        model_for(folder, template)
    return Renderer.load(str(folder), PromptOptions(**options))
