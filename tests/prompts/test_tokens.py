"""Tokenizers with and without character ranges of their own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from hsdump.errors import InputError
from hsdump.prompts import PromptOptions, Renderer, read_samples
from hsdump.prompts.samples_file import writing_samples
from hsdump.prompts.tokens import _BYTE_OF, ByteTokens, FastTokens, _character_ranges

from .helpers import chat, learned, make_model, one, skip
from .templates import CHATML, CONTROL_TOKENS

SLOW_TOKENIZER = '''
from transformers import PreTrainedTokenizer


class TwoByteTokenizer(PreTrainedTokenizer):
    """Pairs of bytes, as a tokenizer that is not fast would cut them."""

    def __init__(self, upper=False, **kwargs):
        visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [n for n in range(256) if n not in visible]
        self.letters = {n: chr(n) for n in visible} | {n: chr(256 + i) for i, n in enumerate(hidden)}
        self.ids = {}
        self.upper = upper
        super().__init__(upper=upper, **kwargs)

    @property
    def vocab_size(self):
        return 70000

    def get_vocab(self):
        return {f"word{n}": n for n in range(1000)}

    def _tokenize(self, text, **kwargs):
        data = (text.upper() if self.upper else text).encode()
        return ["".join(self.letters[b] for b in data[i : i + 2]) for i in range(0, len(data), 2)]

    def _convert_token_to_id(self, token):
        return 100 + self.ids.setdefault(token, len(self.ids))

    def _convert_id_to_token(self, number):
        return next(token for token, n in self.ids.items() if n == number - 100)
'''


def slow_model(folder: Path, *, upper: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenization_twobyte.py").write_text(SLOW_TOKENIZER)
    added = {str(n): {"content": text, "special": True} for n, text in enumerate(CONTROL_TOKENS)}
    config = {
        "tokenizer_class": "TwoByteTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_twobyte.TwoByteTokenizer", None]},
        "added_tokens_decoder": added,
        "chat_template": CHATML,
        "upper": upper,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def modules_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the copy that transformers makes of a model's code out of the home folder."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.mark.usefixtures("modules_cache")
def test_a_tokenizer_of_bytes_gives_the_same_masks(tmp_path: Path) -> None:
    folder = slow_model(tmp_path / "slow")
    renderer = Renderer.load(str(folder), PromptOptions(trust_remote_code=True))
    assert isinstance(renderer.tokens, ByteTokens)
    reply = "🇯🇵 é, 你好!"
    sample = one(renderer, chat("Name a colour. ä", reply))
    assert renderer.tokens.decode(sample.input_ids.tolist()).endswith(f"{reply}<|im_end|>\n")
    # Two bytes at a time from the line break on: the token of "\n" and the reply's first byte is counted out.
    assert learned(renderer, sample).endswith(" é, 你好!<|im_end|>")
    assert skip(renderer, chat("a", "b <|stop|>").value).reason == "control-token-in-content"


@pytest.mark.usefixtures("modules_cache")
def test_tokens_that_are_not_the_text_are_refused(tmp_path: Path) -> None:
    folder = slow_model(tmp_path / "slow", upper=True)
    renderer = Renderer.load(str(folder), PromptOptions(trust_remote_code=True))
    result = skip(renderer, chat("a", "b").value)
    assert (result.reason, result.lost) == ("offsets-not-provable", True)


@pytest.mark.usefixtures("modules_cache")
def test_a_models_own_code_is_not_run_unasked(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--trust-remote-code"):
        Renderer.load(str(slow_model(tmp_path / "slow")), PromptOptions())


@given(text=st.text(alphabet="aé你🇯🇵\n\u200b", max_size=20))
def test_byte_ranges_are_the_fast_tokenizers_ranges(text: str) -> None:
    """Ranges worked out from byte lengths equal those that a byte-level fast tokenizer reports itself."""
    tokens = _byte_level()
    ids, ranges = tokens.encode(text, add_special_tokens=False)
    lengths = [len([_BYTE_OF[letter] for letter in tokens.backend.id_to_token(number)]) for number in ids.tolist()]
    assert _character_ranges(text.encode(), np.asarray(lengths, dtype=np.int64)).tolist() == ranges.tolist()


def _byte_level() -> FastTokens:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return FastTokens(backend=tokenizer)


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    renderer = Renderer.load(str(make_model(tmp_path / "a", CHATML)), PromptOptions())
    with writing_samples(tmp_path / "s.parquet", {"tokenizer_digest": "0" * 32}) as file:
        file.append(one(renderer, chat("a", "b")), "sentinel")
    with pytest.raises(InputError, match="prepared with another tokenizer"):
        list(read_samples([tmp_path / "s.parquet"], renderer, renderer.options))
    with writing_samples(tmp_path / "t.parquet", {"tokenizer_digest": renderer.tokenizer_digest}) as file:
        file.append(one(renderer, chat("a", "b")), "sentinel")
    assert len(list(read_samples([tmp_path / "t.parquet"], renderer, renderer.options))) == 1


def test_a_tokenizers_own_truncation_and_padding_are_off(tmp_path: Path) -> None:
    folder = make_model(tmp_path, CHATML)
    plain = one(Renderer.load(str(folder), PromptOptions()), chat("a", "word " * 40))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(max_length=8)
    tokenizer.enable_padding(length=2000)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert one(Renderer.load(str(folder), PromptOptions()), chat("a", "word " * 40)).key == plain.key
