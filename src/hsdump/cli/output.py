"""The one place that prints results and turns errors into exit codes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console, RenderableType


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a command found: data for scripts, the same for people, and the exit code of both."""

    data: Any
    """Anything msgspec can encode: a dict, a dataclass, a Struct."""

    text: RenderableType

    exit_code: int = 0


def emit(result: Result, *, as_json: bool) -> int:
    """Print a result on standard output, as JSON or for people, and give its exit code back."""
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(result.data), indent=2).decode() + "\n")
    else:
        Console().print(result.text)
    return result.exit_code
