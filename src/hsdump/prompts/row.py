"""One record of an input file, before anything is known about its meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One record as the file holds it."""

    source: str
    """`file.jsonl:12` (line, from 1) or `file.json[3]`, `file.parquet[3]` (index, from 0)."""

    value: Any
