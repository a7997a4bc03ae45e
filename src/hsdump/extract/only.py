"""`--only`: a subset of the input, by the rows' own ids or by keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hsdump.arrays import xxh3
from hsdump.errors import UsageError
from hsdump.keys import KeySet
from hsdump.samples import TokenSample


class Only:
    """Which samples are wanted; all of them when nothing was named."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._wanted = KeySet(_digest(name) for name in names)
        self._found = KeySet()

    def wants(self, sample: TokenSample) -> bool:
        if not self._names:
            return True
        hits = [digest for name in (sample.key, sample.source) if (digest := _digest(name)) in self._wanted]
        self._found.update(hits)
        return bool(hits)

    def not_found(self) -> list[str]:
        """List the names that no sample of the input had."""
        return sorted({name for name in self._names if _digest(name) not in self._found})


def _digest(name: str) -> str:
    return xxh3(name.encode("utf-8", "surrogatepass"))


def read_names(values: Sequence[str]) -> tuple[str, ...]:
    """Take ids as they were given: `a,b`, several options, or `@FILE` with one id a line.

    Raises:
        UsageError: the file cannot be read, or nothing is named.
    """
    names: list[str] = []
    for value in values:
        if value.startswith("@"):
            try:
                lines = Path(value[1:]).read_text(encoding="utf-8").split("\n")
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"--only {value} cannot be read: {error}", "name a file with one id a line") from error
            names += [line.strip() for line in lines if line.strip()]
        else:
            names += [name for name in value.split(",") if name]
    if values and not names:
        raise UsageError("--only names nothing", "give ids or keys: --only id-1,id-2 or --only @ids.txt")
    return tuple(dict.fromkeys(names))
