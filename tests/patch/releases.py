"""Wheels of every SGLang release that the patch is for, and trees unpacked from them."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

WHEELS = Path(__file__).parents[2] / ".cache/sglang-wheels"
LIST = Path(__file__).parents[1] / "engine_env/releases.txt"


def releases() -> list[str]:
    """Name the releases, oldest first."""
    return LIST.read_text(encoding="utf-8").split()


def wheel(version: str) -> Path:
    """Give a release's wheel."""
    found = sorted(WHEELS.glob(f"sglang-{version}-*.whl"))
    assert found, f"the wheel of SGLang {version} is missing; download it with `make sglang-wheels`"
    return found[0]


def unpack(version: str, folder: Path) -> Path:
    """Unpack a release as an installer would: the package and its metadata."""
    with zipfile.ZipFile(wheel(version)) as archive:
        names = [name for name in archive.namelist() if name.startswith("sglang/") or ".dist-info/" in name]
        archive.extractall(folder, names)
    return folder


def tree(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Give every file below a folder: sha256, mode, time."""
    return {
        path.relative_to(folder).as_posix(): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mode,
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
