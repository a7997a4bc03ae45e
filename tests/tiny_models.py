"""The tiny models of the tests, made once and kept under `.cache/models/`.

python -m tests.tiny_models     makes all that are missing
"""

from __future__ import annotations

import hashlib
import platform
import shutil
from pathlib import Path
from typing import get_args

import tokenizers
import torch
import transformers

from hsdump.demo import tiny_model, tokenizer
from hsdump.demo.tiny_model import Architecture, make_tiny_model

CACHE = Path(__file__).parents[1] / ".cache/models"


def tiny_model_path(architecture: Architecture) -> Path:
    """Give the cached model, made first if it is missing."""
    folder = CACHE / f"{_version()}-{architecture}"
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        make_tiny_model(part, architecture).rename(folder)  # a model made halfway never looks like one
    return folder


def _version() -> str:
    """Name everything that the bytes of a model depend on: its recipe and the releases that carry it out."""
    recipe = b"".join(Path(str(module.__file__)).read_bytes() for module in (tiny_model, tokenizer))
    releases = (torch.__version__, transformers.__version__, tokenizers.__version__, platform.python_version())
    return hashlib.sha256(recipe + repr(releases).encode()).hexdigest()[:12]


if __name__ == "__main__":
    for name in get_args(Architecture):
        tiny_model_path(name)
