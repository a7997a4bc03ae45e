"""Reading option values that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hsdump.errors import UsageError


def one_of(option: str, value: str, known: tuple[str, ...]) -> Any:
    """Give the value back when it is one of the known words; typed Any so that it fits the Literal it was checked for.

    Raises:
        UsageError: it is none of them.
    """
    if value not in known:
        raise UsageError(f"{option} {value} is not known", f"choose one of {', '.join(known)}")
    return value


def read_template(path: Path | None) -> str | None:
    """Read a Jinja template file.

    Raises:
        UsageError: it cannot be read.
    """
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template {path} cannot be read: {error}", "pass a Jinja file in UTF-8") from error


def roles_of(pairs: list[str]) -> dict[str, str]:
    """Read `NAME=assistant` pairs.

    Raises:
        UsageError: one has no equals sign.
    """
    roles = {}
    for pair in pairs:
        name, equals, role = pair.rpartition("=")
        if not (name and equals and role):
            raise UsageError(f"--role {pair} has no =", "write --role my_model_v2=assistant")
        roles[name] = role
    return roles
