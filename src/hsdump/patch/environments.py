"""Which environments of this machine have an SGLang: patched ones, running ones, active ones, named ones."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hsdump.errors import HsdumpError
from hsdump.patch.live import PROC
from hsdump.patch.site import Site, find_site

_DEPTH = 8


def _list_file() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local/state")
    return Path(base) / "hsdump/environments.json"


def remember(site: Site) -> None:
    """Note an environment that was patched, so that `status --all` finds it from anywhere. Best effort."""
    path = _list_file()
    with contextlib.suppress(OSError):
        known = {*_known(), str(site.package)}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(sorted(known), indent=1))
        partial.replace(path)


def _known() -> list[str]:
    try:
        found = json.loads(_list_file().read_bytes())
        return [str(path) for path in found] if isinstance(found, list) else []
    except (OSError, ValueError):
        return []


def find_sites(search: list[Path]) -> list[Site]:
    """Find every SGLang that can be found without walking the whole disk, each once."""
    found: dict[Path, Site] = {}
    for package in [*_known(), *_below(search)]:
        with contextlib.suppress(HsdumpError):
            site = find_site(folder=Path(package))
            found.setdefault(site.package, site)
    for python in _interpreters():
        with contextlib.suppress(HsdumpError):
            site = find_site(python=python)
            found[site.package] = site  # an interpreter says more than a folder
    return sorted(found.values(), key=lambda site: str(site.package))


def _interpreters() -> list[str]:
    """Name interpreters: active environments, those on PATH, conda's list, those of running servers."""
    prefixes = [os.environ.get(name, "") for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    with contextlib.suppress(OSError):
        prefixes += (Path.home() / ".conda/environments.txt").read_text().split("\n")
    names = [str(Path(prefix) / "bin/python") for prefix in prefixes if prefix]
    names += [path for name in ("python3", "python") if (path := shutil.which(name))]
    names += _of_servers()
    return [name for name in dict.fromkeys(names) if os.access(name, os.X_OK)]


def _of_servers() -> Iterator[str]:
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if any(word.startswith("sglang.") for word in words) and words[0].startswith("/"):
                    yield words[0]


def _below(search: list[Path]) -> Iterator[str]:
    """Give every `sglang` package below some folders, to a depth."""
    for top in search:
        for folder, names, _ in os.walk(top):
            if len(Path(folder).relative_to(top).parts) >= _DEPTH:
                names.clear()
            if "sglang" in names and (Path(folder) / "sglang/srt").is_dir():
                yield str(Path(folder) / "sglang")
            names[:] = [name for name in names if name not in ("sglang", ".git", "node_modules")]
