"""The text that is put into SGLang's files: marked, hashed, and without any logic beyond handing over."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from hsdump._version import __version__
from hsdump.spool.names import ENV_DUMP_DIR

_MARK = re.compile(rb"# >>> hsdump patch ([0-9a-f]{8}) begin")

_HAND_OVER = """\
import os as _hsdump_os

if _hsdump_os.environ.get({switch!r}):
    try:
        import sys as _hsdump_sys

        _hsdump_sys.path.insert(0, {code!r})
        from hsdump.sglang import patched as _hsdump

        _hsdump.{function}({name})
    except Exception as _hsdump_error:  # the server goes on without capture
        import logging as _hsdump_logging

        _hsdump_logging.getLogger("hsdump").error("hsdump captures nothing: %r", _hsdump_error)
"""

_BEGIN = """\
_hsdump_pass = None
if self._hsdump_loop is not None:
    _hsdump_pass = self._hsdump_loop.begin(input_ids, forward_batch)
"""

_LAYER = """\
if _hsdump_pass is not None:
    _hsdump_pass.layer({index}, hidden_states, residual)
"""

_FINAL = """\
if _hsdump_pass is not None:
    _hsdump_pass.final(hidden_states)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One thing to insert, before it is given an id and the place of hsdump's code."""

    kind: str
    """`logits`, `runner`, `batch`, `model` (after a class), `begin`, `layer`, `final` (in a forward loop)."""

    after_line: int
    """It follows this line of the original, counted from 1."""

    name: str = ""
    """Of the class, or of the loop's variable."""

    indent: str = ""

    anchor: str = ""
    """Where that is, for people."""

    def body(self, code: Path) -> str:
        """Give the lines between the markers."""
        if self.kind == "begin":
            return _BEGIN
        if self.kind == "layer":
            return _LAYER.format(index=self.name)
        if self.kind == "final":
            return _FINAL
        off = f"{self.name}._hsdump_loop = None\n" if self.kind == "model" else ""
        function = f"attach_{self.kind}"
        return off + _HAND_OVER.format(switch=ENV_DUMP_DIR, code=str(code), function=function, name=self.name)

    def text(self, patch_id: str, code: Path) -> str:
        """Give the marked block, its lines ended by a line feed."""
        body = self.body(code)
        head = f"# >>> hsdump patch {patch_id} begin {self.kind} ({__version__}; `hsdump patch restore` takes it out)\n"
        tail = f"# <<< hsdump patch {patch_id} end sha256:{hashlib.sha256(body.encode()).hexdigest()[:16]}\n"
        lines = (head + body + tail).splitlines(keepends=True)
        return "".join(self.indent + line if line.strip() else line for line in lines)


def fit(original: bytes, texts: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Give blocks the line ends of the file, so that each can be put in and taken out as it is.

    Args:
        texts: (line they follow, block), lines ended by a line feed.

    Returns:
        The same in the order of lines.
    """
    lines = original.splitlines(keepends=True)
    newline = "\r\n" if lines and lines[0].endswith(b"\r\n") else "\n"
    open_end = bool(lines) and not lines[-1].endswith((b"\n", b"\r"))
    fitted = []
    for line, text in sorted(texts, key=lambda item: item[0]):
        block = text.replace("\n", newline)
        if open_end and line == len(lines):
            block = newline + block.removesuffix(newline)
        fitted.append((line, block))
    return fitted


def insert(original: bytes, texts: list[tuple[int, str]]) -> bytes:
    """Put fitted blocks after the lines they follow; every byte of the original stays."""
    lines = original.splitlines(keepends=True)
    for line, block in reversed(texts):
        lines.insert(line, block.encode())
    return b"".join(lines)


def take_out(current: bytes, texts: list[tuple[int, str]]) -> bytes | None:
    """Remove blocks from a file that may have been edited elsewhere; None when one is not there as it was written."""
    for _, text in texts:
        if current.count(text.encode()) != 1:
            return None
        current = current.replace(text.encode(), b"")
    return current


def marks(data: bytes) -> list[str]:
    """Give the ids of the patches whose blocks are in a file, each once."""
    return sorted({match.decode() for match in _MARK.findall(data)})
