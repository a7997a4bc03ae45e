"""Text that every machine has: what the target learns, and the questions that it is asked.

Python's own library and whatever packages are installed beside it, licences, documentation and man pages. All of it is
cut into exchanges, the first lines of a function or a paragraph and how it goes on, so that the target answers a
question after minutes of training. Files are held out by their name: neither the target nor the drafter sees them, and
the questions of the bench come from those.
"""

from __future__ import annotations

import gzip
import json
import random
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.story.scale import Scale

from hsdump.demo.tokenizer import make_tokenizer
from hsdump.demo.train_target import LONGEST_BLOCK, SHORTEST_BLOCK, Exchange, chat_text, exchanges

PROSE = ("/usr/share/common-licenses", "/usr/share/doc", "/usr/share/man")
LONGEST_FILE = 1 << 20
"""Tables and generated code teach nothing."""

TOKENIZER_BYTES = 16 << 20
LONGEST_QUESTION, SHORTEST_QUESTION = 192, 16
"""Tokens."""

ENCODED_AT_ONCE = 4000
POOL_BYTES = 16 << 20
"""Less text than this is read in one process."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """What was found on this machine."""

    learn: list[Exchange]
    held_out: list[Exchange]
    files: int
    bytes: int


def held_out(name: str, share: float) -> bool:
    return int(sha256(name.encode()).hexdigest()[:8], 16) < share * (1 << 32)


def find_files(limit: int, carried: Path | None) -> list[Path]:
    """Give Python files up to so many bytes, then other text up to an eighth of that; the same ones each time."""
    library, packages = (Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib"))
    top = sorted(library.glob("*.py"))
    below = (path for path in sorted(library.rglob("*.py")) if path.parent != library and packages not in path.parents)
    beside = iter(sorted(packages.rglob("*.py")))
    code = _up_to(limit, (path for part in (top, below, beside) for path in part))
    prose = [Path(folder) for folder in PROSE] + ([carried] if carried is not None else [])
    others = (path for folder in reversed(prose) for path in sorted(folder.rglob("*")) if _is_prose(path))
    return [*code, *_up_to(limit // 8, others)]


def _up_to(limit: int, paths: Iterable[Path]) -> Iterator[Path]:
    total = 0
    for path in paths:
        try:
            size = path.stat().st_size
        except OSError:  # a link to nowhere
            continue
        if 0 < size <= LONGEST_FILE:
            total += size
            if total > limit:
                return
            yield path


def _is_prose(path: Path) -> bool:
    known = path.suffix in {"", ".txt", ".md", ".rst", ".gz"} or path.suffix[1:].isdigit()
    return known and path.is_file() and not path.is_symlink()


def read_texts(scale: Scale, carried: Path | None = None) -> Texts:
    """Read and cut everything."""
    files = find_files(scale.text_bytes, carried)
    parts = [files[start : start + 200] for start in range(0, len(files), 200)]
    if scale.text_bytes < POOL_BYTES:
        found = [cut(part, scale.held_out) for part in parts]
    else:  # forked: a new Python would import torch for each, and no thread is at work yet
        with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
            found = list(pool.map(partial(cut, share=scale.held_out), parts))
    every = [one for part in found for one in part]
    return Texts(
        learn=[exchange for apart, exchange in every if not apart],
        held_out=[exchange for apart, exchange in every if apart],
        files=len(files),
        bytes=sum(len(exchange.head) + len(exchange.rest) for _, exchange in every),
    )


def cut(files: Sequence[Path], share: float) -> list[tuple[bool, Exchange]]:
    """Cut files into exchanges, each with whether its file is held out."""
    found: list[tuple[bool, Exchange]] = []
    for path in files:
        apart = held_out(path.name, share)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of other people's escapes
                pieces = list(exchanges([path], 0) if path.suffix == ".py" else prose(path))
        except (OSError, ValueError, RecursionError, EOFError):  # unreadable: nothing to learn from
            continue
        found += ((apart, piece) for piece in pieces)
    return found


def prose(path: Path) -> Iterator[Exchange]:
    """Cut a text without functions at its lines."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    text = data.decode("utf-8", errors="replace")
    if "\x00" in text:
        return
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    for start in range(0, len(lines), LONGEST_BLOCK):
        piece = lines[start : start + LONGEST_BLOCK]
        if len(piece) >= SHORTEST_BLOCK:
            head = max(2, len(piece) // 4)
            yield Exchange("\n".join(piece[:head]), "\n".join(piece[head:]), f"{path.name}#{start}")


def prepare(scale: Scale, folder: Path, carried: Path | None = None) -> dict[str, Any]:
    """Write the tokenizer, the target's training rows and the questions into a folder; give the figures."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = read_texts(scale, carried)
    chance = random.Random(0)
    learn = list(texts.learn)
    chance.shuffle(learn)
    some, size = [], 0
    for exchange in learn:
        some.append(f"{exchange.head}\n{exchange.rest}")
        size += len(some[-1])
        if size > TOKENIZER_BYTES:
            break
    tokenizer = make_tokenizer(some, scale.vocab_size, scale.positions)
    tokenizer.save_pretrained(folder / "tokenizer")
    figures = {"files": texts.files, "characters": texts.bytes, "exchanges": len(learn)}
    for name, found in (("rows", learn), ("held-out-rows", texts.held_out)):
        rows = to_rows(encode(tokenizer, found), scale.row_tokens)
        np.save(folder / f"{name}.npy", rows)
        figures[f"{name.replace('-', '_')}_tokens"] = rows.size
    figures["questions"] = write_questions(folder / "learn.jsonl", tokenizer, learn, scale.learn)
    figures["test_questions"] = write_questions(folder / "test.jsonl", tokenizer, texts.held_out, scale.test)
    return figures


def encode(tokenizer: Any, found: Sequence[Exchange]) -> list[np.ndarray]:
    """Write exchanges as the chat template does, as uint16 ids; some at a time, as lists of ids take memory."""
    arrays = []
    for start in range(0, len(found), ENCODED_AT_ONCE):
        texts = [chat_text(exchange) for exchange in found[start : start + ENCODED_AT_ONCE]]
        encoded = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        arrays += [np.array(one.ids, dtype=np.uint16) for one in encoded]
    return arrays


def to_rows(documents: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Lay documents end to end into rows [R, T]."""
    flat = np.concatenate(documents)
    return flat[: len(flat) // length * length].reshape(-1, length)


def write_questions(path: Path, tokenizer: Any, found: Sequence[Exchange], number: int) -> int:
    """Write so many questions of a fitting length, from all over the text."""
    order = list(found)
    random.Random(1).shuffle(order)
    written, seen = 0, set()
    with path.open("w", encoding="utf-8") as file:
        for exchange in order:
            if written == number:
                break
            length = len(tokenizer(exchange.head, add_special_tokens=False)["input_ids"])
            if SHORTEST_QUESTION <= length <= LONGEST_QUESTION and exchange.head not in seen:
                seen.add(exchange.head)
                category = "code" if ".py#" in exchange.source else "prose"
                messages = [{"role": "user", "content": exchange.head}]
                row = {"id": f"{written}-{exchange.source}", "category": category, "messages": messages}
                file.write(json.dumps(row) + "\n")
                written += 1
    return written
