"""Data sets by their names on the Hugging Face hub: `org/name`, `org/name:split`.

The extra `datasets` knows which files of a repository are which split, and streams them, so that nothing is downloaded
that is not read. `HF_DATASETS_OFFLINE=1` or `HF_HUB_OFFLINE=1` reads from the cache alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hsdump.errors import InputError
from hsdump.prompts.row import Row

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?::[\w.\[\]%:+-]+)?")
_FILES = frozenset({".arrow", ".csv", ".gz", ".json", ".jsonl", ".ndjson", ".parquet", ".tsv", ".txt", ".zst"})
DEFAULT_SPLIT = "train"


def is_dataset(path: Path) -> bool:
    """Tell a name on the hub from a file: it looks like one, and no such file is here."""
    return _NAME.fullmatch(str(path)) is not None and path.suffix.lower() not in _FILES and not path.exists()


def dataset_rows(path: Path) -> Iterator[Row]:
    """Stream the rows of a data set.

    Raises:
        InputError: it cannot be had; says what is missing.
    """
    name, _, split = str(path).partition(":")
    split = split or DEFAULT_SPLIT
    for index, value in enumerate(_load(name, split)):
        yield Row(source=f"{name}:{split}[{index}]", value=dict(value))


def _load(name: str, split: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        what = f"{name} is no file here, and reading a data set of the hub needs the extra `datasets`"
        fix = f"pip install 'hsdump[datasets]', or fetch it (hf download --repo-type dataset {name}) and name its files"
        raise InputError(what, fix) from error
    offline = any(os.environ.get(flag, "0") not in ("0", "") for flag in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"))
    try:
        return datasets.load_dataset(_cached(name) if offline else name, split=split, streaming=True)
    except Exception as error:
        # datasets raises FileNotFoundError, ValueError, ConnectionError and classes of three other packages.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        fix = f"check the name and the split ({name}:SPLIT); {DEFAULT_SPLIT} is read where none is named"
        if offline or isinstance(error, ConnectionError | OSError):
            fix += f"; without a network: hf download --repo-type dataset {name} elsewhere, then pass its files"
        raise InputError(
            f"there is no file {name}, and the data set {name}, split {split}, cannot be read: {reason}", fix
        ) from error


def _cached(name: str) -> str:
    """Give the folder of the data set's files in the hub's cache: offline, `datasets` does not look there itself.

    Raises:
        OSError: it is not there.
    """
    from huggingface_hub import snapshot_download

    return str(snapshot_download(name, repo_type="dataset", local_files_only=True))
