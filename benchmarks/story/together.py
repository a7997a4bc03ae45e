"""Several servers at once: each start is half a minute of imports, and they need not wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack

Starts = Mapping[str, Callable[[], AbstractContextManager[str]]]


def together(stack: ExitStack, starts: Starts, *, at_once: int) -> dict[str, str]:
    """Start servers side by side and give their URLs; the stack stops them all, also those beside one that fails."""

    def start(name: str) -> str:
        return stack.enter_context(starts[name]())

    with ThreadPoolExecutor(max_workers=at_once) as pool:
        return dict(zip(starts, pool.map(start, starts), strict=True))
