"""A small package with the shape of SGLang 0.5.9, installed as a wheel would be; and a disk that kills or fails."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import py_compile
import signal
from pathlib import Path
from typing import Any

from hsdump.patch.disk import PARTIAL, Disk, Stamp

LOGITS = '''"""Logits."""


class LogitsProcessor:
    def forward(self, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states=None):
        return aux_hidden_states


AFTER = 1
'''
RUNNER = """class ModelRunner:
    def load_model(self):
        self.model = "model"

    def forward(self, forward_batch, skip=False):
        return forward_batch"""  # no line end: the block must bring one, and take it away again
BATCH = """from dataclasses import dataclass\r
\r
\r
@dataclass\r
class ForwardBatch:\r
    positions: int = 0\r
\r
    @classmethod\r
    def init_new(cls, batch, model_runner):\r
        return cls()\r
"""
MODEL = """class TinyModel:
    def forward(self, input_ids, positions, forward_batch):
        hidden_states, residual = input_ids, None
        for i in range(self.start_layer, self.end_layer):
            layer = self.layers[i]
            hidden_states, residual = layer(positions, hidden_states, forward_batch, residual)
        if self.last:
            hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states
"""
FILES = {
    "sglang/__init__.py": "",
    "sglang/version.py": '__version__ = "0.5.9"\n',
    "sglang/srt/__init__.py": "",
    "sglang/srt/layers/__init__.py": "",
    "sglang/srt/layers/logits_processor.py": LOGITS,
    "sglang/srt/models/tiny.py": MODEL,
    "sglang/srt/model_executor/__init__.py": "",
    "sglang/srt/model_executor/model_runner.py": RUNNER,
    "sglang/srt/model_executor/forward_batch_info.py": BATCH,
}
OLD_S = 1_600_000_000


def make_site(root: Path, files: dict[str, str] | None = None, *, version: str = "0.5.9", wheel: bool = True) -> Path:
    """Write the package, with its RECORD and a compiled file of one module; all files are some years old."""
    record = []
    for name, text in {**FILES, **(files or {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
        path.chmod(0o640)
        os.utime(path, ns=(OLD_S * 10**9, OLD_S * 10**9 + 123_456_789))
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(text.encode())}")
    compiled = root / "sglang/srt/layers/logits_processor.py"
    # Used without a look at the source: with it left in place, the patch would never run.
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(compiled), doraise=True, invalidation_mode=mode)
    if wheel:
        info = root / f"sglang-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
        (info / "RECORD").write_text("\n".join(record) + "\n")
    return root


def everything(root: Path) -> dict[str, tuple[bytes, int, int]]:
    """Give every file, compiled ones too: bytes, mode, time."""
    return {
        path.relative_to(root).as_posix(): (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


class FaultyDisk(Disk):
    """Counts operations; at number `fuse` the process is killed (`kill`), or the disk is full from then on (`full`)."""

    def __init__(self, fuse: int, kind: str) -> None:
        self.fuse, self.kind, self.operations = fuse, kind, 0

    def _step(self, writes: bool = True) -> None:
        self.operations += 1
        if self.kind == "kill" and self.operations == self.fuse:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "full" and writes and self.operations >= self.fuse:
            raise OSError(errno.ENOSPC, "No space left on device")

    def write(self, path: Path, data: bytes, like: Path | None = None, stamp: Stamp | None = None) -> None:
        self._step()
        self.operations += 1
        if self.kind == "kill" and self.operations == self.fuse:  # in the middle of the bytes
            path.with_name(path.name + PARTIAL).write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        super().write(path, data, like, stamp)
        self._step(False)

    def replace(self, old: Path, new: Path) -> None:
        self._step(False)
        super().replace(old, new)
        self._step(False)

    def sync_folder(self, path: Path) -> None:
        self._step(False)
        super().sync_folder(path)

    def stamp(self, path: Path, stamp: Stamp) -> None:
        self._step(False)
        super().stamp(path, stamp)

    def remove(self, path: Path) -> None:
        self._step(False)
        super().remove(path)

    def remove_folder(self, path: Path) -> None:
        self._step(False)
        super().remove_folder(path)


def in_child(action: Any) -> int:
    """Run something in a child process that may be killed; gives its exit code, or minus the signal's number."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
