"""One tokenizer as the masks need it: ids, and for each id the characters that it stands for.

Fast tokenizers give character ranges themselves. Others (tiktoken models such as Kimi's) do not, but their tokens are
bytes: if the bytes of all tokens put together are the text, byte for byte, the ranges follow; if not, they are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hsdump.arrays import xxh3
from hsdump.errors import InputError
from hsdump.lean import torch_hidden
from hsdump.prompts.options import RowRefused

_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt", "vocab.txt")


class Tokens(Protocol):
    """A tokenizer that can say where its tokens lie."""

    @property
    def special(self) -> dict[int, str]:
        """Control tokens: id to text."""

    @property
    def added(self) -> tuple[str, ...]:
        """Texts of all tokens that were added to the vocabulary as wholes."""

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Give ids [S] and character ranges [S, 2]; tokens that the tokenizer adds itself have empty ranges.

        Raises:
            RowRefused: the ranges cannot be told.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Give the text of ids, control tokens included."""


@dataclass(frozen=True, kw_only=True)
class FastTokens:
    """A `tokenizers.Tokenizer`."""

    backend: Any
    special: dict[int, str] = field(init=False)
    added: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        # A tokenizer.json may ask for either; transformers switches both off for each call, and so must we.
        self.backend.no_truncation()
        self.backend.no_padding()
        decoder = self.backend.get_added_tokens_decoder()
        special = {number: token.content for number, token in decoder.items() if token.special}
        object.__setattr__(self, "special", special)
        object.__setattr__(self, "added", tuple(token.content for token in decoder.values()))

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
        offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return np.asarray(encoding.ids, dtype=np.int64), offsets

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=False))


@dataclass(frozen=True, kw_only=True)
class ByteTokens:
    """A tokenizer of transformers without character ranges, whose tokens are bytes."""

    tokenizer: Any
    special: dict[int, str] = field(init=False)
    added: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        decoder = self.tokenizer.added_tokens_decoder
        special = {int(number): str(token) for number, token in decoder.items() if getattr(token, "special", True)}
        object.__setattr__(self, "special", special)
        object.__setattr__(self, "added", tuple(str(token) for token in decoder.values()))

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        # The call that transformers makes itself after rendering a template, so the ids are the server's.
        ids = np.asarray(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"], dtype=np.int64)
        ids = ids.reshape(-1)
        pieces = [self._bytes(number) for number in ids.tolist()]
        data = text.encode()
        front = 0
        while add_special_tokens and front < len(pieces) and not data.startswith(pieces[front]):
            pieces[front] = b""
            front += 1
        if b"".join(pieces) != data:
            raise RowRefused("offsets-not-provable", "the tokenizer's tokens put together are not the text")
        return ids, _character_ranges(data, np.asarray([len(piece) for piece in pieces], dtype=np.int64))

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self._bytes(number) for number in ids).decode(errors="replace")

    def _bytes(self, number: int) -> bytes:
        added = self.special.get(number)
        if added is not None:
            return added.encode()
        token = str(self.tokenizer.convert_ids_to_tokens(number))
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:
            return token.encode()  # an added word; if it is anything else, the comparison with the text will tell


def _character_ranges(data: bytes, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Turn byte lengths of consecutive tokens into character ranges; a part of a character gets all of it."""
    begins = np.frombuffer(data, dtype=np.uint8) & 0xC0 != 0x80
    character = np.append(np.cumsum(begins) - 1, begins.sum())
    ends = np.cumsum(lengths)
    starts = ends - lengths
    ranges = np.stack([character[starts], character[ends - 1] + 1], axis=1)
    ranges[lengths == 0, 1] = ranges[lengths == 0, 0]
    return ranges


def _byte_alphabet() -> dict[str, int]:
    """Map the printable stand-ins of byte-level vocabularies (GPT-2's, which all others took over) to bytes."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [number for number in range(256) if number not in set(visible)]
    return {chr(number): number for number in visible} | {chr(256 + at): number for at, number in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


def load_tokenizer(model_path: str, *, trust_remote_code: bool) -> tuple[Any, Tokens]:
    """Load a tokenizer as transformers does; no weights are touched.

    Raises:
        InputError: there is none, or it wants to run code of its own and may not.
    """
    with torch_hidden():
        from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except Exception as error:
        # transformers raises OSError, ValueError, KeyError, ImportError and more for a folder that is no model.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        fix = "pass the model's folder"
        if "trust_remote_code" in str(error):
            fix = "read the model's tokenizer code, and if you trust it pass --trust-remote-code"
        raise InputError(f"no tokenizer can be loaded from {model_path}: {reason}", fix) from error
    if getattr(tokenizer, "is_fast", False):
        return tokenizer, FastTokens(backend=tokenizer.backend_tokenizer)
    return tokenizer, ByteTokens(tokenizer=tokenizer)


def tokenizer_digest(model_path: str, tokens: Tokens) -> str:
    """Give the xxh3 of the tokenizer's files."""
    files = [Path(model_path) / name for name in _FILES]
    found = [file.read_bytes() for file in files if file.is_file()]
    if not found and isinstance(tokens, FastTokens):
        # A name on the hub: the files lie in a cache whose layout is not ours, so digest what was loaded.
        found = [tokens.backend.to_str().encode()]
    elif not found and isinstance(tokens, ByteTokens):
        found = [repr(sorted(tokens.tokenizer.get_vocab().items())).encode()]
    return xxh3(*found)
