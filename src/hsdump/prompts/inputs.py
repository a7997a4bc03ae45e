"""Files in, rows out. The format is found from the content, because names in the field lie about it.

Nothing here knows what a row means. Memory is bounded by the largest single row, not by the file.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, cast

import msgspec

from hsdump.errors import InputError
from hsdump.prompts.hub import dataset_rows, is_dataset
from hsdump.prompts.options import Skip
from hsdump.prompts.row import Row

_CHUNK_CHARS = 1 << 20
_WHOLE_DOCUMENT_BYTES = 256 << 20
"""A file that starts with an unfinished `{` is tried as one JSON object up to this size."""

_HEADER_WORDS = frozenset({"question", "answer", "prompt", "completion", "response", "instruction", "output", "text"})
"""A first TSV line with one of these is a header. Without a header there are two columns, question and answer."""


def read_rows(path: Path) -> Iterator[Row | Skip]:
    """Yield the rows of one file in order.

    A line that is not JSON, or not UTF-8, is a `Skip` with its own line number.

    Raises:
        InputError: the file is missing, unreadable, or no format that is known here.
    """
    check_input(path)
    if is_dataset(path):
        yield from dataset_rows(path)
        return
    try:
        with path.open("rb") as file:
            magic = file.read(6)
        if magic.startswith(b"PAR1"):
            yield from _tables().parquet_rows(path)
        elif magic.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
            yield from _tables().arrow_rows(path, stream=not magic.startswith(b"ARROW1"))
        else:
            with _open_plain(path, magic) as file:
                yield from _text_rows(path, file)
    except (OSError, EOFError) as error:
        raise InputError(f"input {path} cannot be read: {error}", "check the file, it may be cut") from error


def _tables() -> ModuleType:
    """pyarrow takes a third of a second to import, and most files are lines of JSON."""
    from hsdump.prompts import tables

    return tables


def check_input(path: Path) -> None:
    """Raise an InputError that helps when there is neither such a file nor, perhaps, such a data set on the hub."""
    if not path.is_file() and not is_dataset(path):
        raise InputError(f"input {path} is not a file", _known_inputs(path))


def _known_inputs(path: Path) -> str:
    if path.is_dir():
        return f"name the files in it, such as {path}/*.jsonl or {path}/*.parquet"
    return "pass JSONL, JSON, Parquet, Arrow, TSV or text files, also as .gz or .zst, or a data set's name on the hub"


def _open_plain(path: Path, magic: bytes) -> BinaryIO:
    if magic.startswith(b"\x1f\x8b"):
        return cast("BinaryIO", gzip.open(path, "rb"))
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        return io.BufferedReader(_tables().zstd_stream(path))
    return path.open("rb")


def _text_rows(path: Path, file: BinaryIO) -> Iterator[Row | Skip]:
    """Tell JSON, tab-separated and plain text apart by the first character that is not space."""
    first, number = b"", 0
    for first in file:
        number += 1
        if first.strip(_JSON_SPACE):
            break
    if number == 1:
        first = first.removeprefix(b"\xef\xbb\xbf")
    suffixes = {suffix.lower() for suffix in path.suffixes}
    if first.lstrip(_JSON_SPACE)[:1] in (b"{", b"[", b'"') or suffixes & {".json", ".jsonl", ".ndjson"}:
        yield from _json_rows(path.name, first.strip(_JSON_SPACE), number, file)
        return
    if b"\0" in first:
        raise InputError(f"input {path} is in no format known here", "pass JSONL, JSON, Parquet, Arrow, TSV or text")
    header: list[str] | None = None
    for line_number, line in enumerate(itertools.chain([first], file), start=number):
        source = f"{path.name}:{line_number}"
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            yield Skip(source=source, reason="bad-text", detail=f"not UTF-8 at byte {error.start}")
            continue
        if not text.strip():
            continue
        if ".tsv" not in suffixes:
            yield Row(source=source, value={"text": text})
            continue
        cells = text.split("\t")
        if header is None and line_number == number and set(cells) & _HEADER_WORDS:
            header = cells
            continue
        names = header or ["question", "answer"]
        if len(cells) != len(names):
            yield Skip(source=source, reason="bad-text", detail=f"{len(cells)} columns, expected {len(names)}")
            continue
        yield Row(source=source, value=dict(zip(names, cells, strict=True)))


def _json_rows(name: str, start: bytes, number: int, file: BinaryIO) -> Iterator[Row | Skip]:
    if start.startswith(b"["):
        yield from _array_rows(name, start, file)
        return
    if start.startswith(b"{") and _decode(start) is _BAD:
        # Either one object over several lines, or lines of which the first is damaged.
        rest = file.read(_WHOLE_DOCUMENT_BYTES)
        whole = _decode(start + b"\n" + rest)
        if whole is not _BAD:
            yield Row(source=f"{name}[0]", value=whole)
            return
        lines = rest.split(b"\n") if rest else []
        yield from _line_rows(name, number, [start, *lines[:-1]])
        yield from _line_rows(name, number + len(lines), _resumed(lines[-1:], file))
        return
    yield from _line_rows(name, number, [start])
    yield from _line_rows(name, number + 1, file)


def _resumed(tail: list[bytes], file: BinaryIO) -> Iterator[bytes]:
    """Join the unfinished last line of a block with what the file still holds of it."""
    if tail:
        yield tail[0] + file.readline()
    yield from file


_JSON_SPACE = b" \t\r\n"


def _line_rows(name: str, number: int, lines: Any) -> Iterator[Row | Skip]:
    """Split at b"\\n" only: U+2028, U+0085 and their like are text inside a JSON string."""
    for line_number, line in enumerate(lines, start=number):
        text = line.strip(_JSON_SPACE)
        if not text:
            continue
        source = f"{name}:{line_number}"
        value = _decode(text)
        if value is _BAD:
            yield Skip(source=source, reason="bad-json", detail=_why_bad(text))
        else:
            yield Row(source=source, value=value)


_BAD = object()


def _decode(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        # Slower and more lenient: lone surrogates and NaN are legal to it, and get their own reason later.
        return json.loads(text)
    except (ValueError, RecursionError):
        return _BAD


def _why_bad(text: bytes) -> str:
    try:
        json.loads(text)
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start}"
    except (ValueError, RecursionError) as error:
        return str(error)
    return "not JSON"


def _array_rows(name: str, start: bytes, file: BinaryIO) -> Iterator[Row | Skip]:
    """Decode the elements of a JSON array one by one; a second array after the first goes on counting."""
    decoder, buffer, index = json.JSONDecoder(), _TextBuffer(start, file), 0
    inside = False
    while buffer.skip(" \t\r\n," if inside else " \t\r\n"):
        head = buffer.text[buffer.at]
        if head == ("]" if inside else "["):
            inside, buffer.at = not inside, buffer.at + 1
            continue
        try:
            value, end = decoder.raw_decode(buffer.text, buffer.at)
        except (ValueError, RecursionError) as error:
            if buffer.more():
                continue
            yield Skip(source=f"{name}[{index}]", reason="bad-json", detail=f"{error}; the rest is unreadable")
            return
        buffer.at = end
        yield Row(source=f"{name}[{index}]", value=value)
        index += 1
    if inside:
        yield Skip(source=f"{name}[{index}]", reason="bad-json", detail="the array is not closed: the file is cut")


class _TextBuffer:
    """A window over a file's text that grows until the element in it is complete."""

    def __init__(self, start: bytes, file: BinaryIO) -> None:
        # The window is text, the file bytes: a character cut at a block's end waits in `pending`.
        self.text, self.at, self._file, self._pending = "", 0, file, start + b"\n"
        self._block = _CHUNK_CHARS
        self.more()

    def more(self) -> bool:
        block = self._file.read(self._block)
        self._block *= 2
        data = self._pending + block
        if not data:
            return False
        cut = len(data)
        if block:
            while cut > len(data) - 4 and cut > 0 and (data[cut - 1] & 0xC0) == 0x80:
                cut -= 1
            if cut > 0 and data[cut - 1] >= 0xC0:
                cut -= 1
        self.text = self.text[self.at :] + data[:cut].decode("utf-8", errors="surrogateescape")
        self.at, self._pending = 0, data[cut:]
        return True

    def skip(self, characters: str) -> bool:
        """Move to the next character that is none of these; False at the end of the file."""
        while True:
            while self.at < len(self.text):
                if self.text[self.at] not in characters:
                    return True
                self.at += 1
            self._block = _CHUNK_CHARS
            if not self.more():
                return False
