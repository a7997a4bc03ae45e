"""Several servers at once: each start is half a minute of imports, and none waits for another, nor when they stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager

Starts = Mapping[str, Callable[[], AbstractContextManager[str]]]


@contextmanager
def together(starts: Starts, *, at_once: int) -> Iterator[dict[str, str]]:
    """Start servers side by side and give their URLs; all stop side by side, also beside one that fails."""
    stacks = {name: ExitStack() for name in starts}
    try:
        with ThreadPoolExecutor(max_workers=at_once) as pool:
            urls = list(pool.map(lambda name: stacks[name].enter_context(starts[name]()), starts))
        yield dict(zip(starts, urls, strict=True))
    finally:
        with ThreadPoolExecutor(max_workers=len(stacks) or 1) as pool:
            list(pool.map(ExitStack.close, stacks.values()))
