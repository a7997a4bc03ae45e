"""Several servers at once: each start is half a minute of imports, and none waits for another, nor when they stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager

from benchmarks.story.state import CLEANING, OutOfTime

Starts = Mapping[str, Callable[[], AbstractContextManager[str]]]


def _raise(_name: str, error: Exception) -> None:
    raise error


@contextmanager
def together(
    starts: Starts, *, at_once: int, needed: Sequence[str] = (), note: Callable[[str, Exception], None] = _raise
) -> Iterator[dict[str, str]]:
    """Start servers side by side and give the URLs of those that came up; all stop side by side.

    Args:
        needed: without these the others are no use: their failure is raised.
        note: told of each other one that failed; without it, every failure is raised.
    """
    stacks = {name: ExitStack() for name in starts}

    def start(name: str) -> str | Exception:
        try:
            return stacks[name].enter_context(starts[name]())
        except Exception as error:  # told below, in the main thread
            return error

    try:
        with ThreadPoolExecutor(max_workers=at_once) as pool:
            found = dict(zip(starts, pool.map(start, starts), strict=True))
        for name, error in found.items():
            if isinstance(error, Exception):
                (_raise if name in needed else note)(name, error)
        yield {name: url for name, url in found.items() if isinstance(url, str)}
    except OutOfTime:
        CLEANING.set()
        raise
    finally:
        with ThreadPoolExecutor(max_workers=len(stacks) or 1) as pool:
            list(pool.map(ExitStack.close, stacks.values()))
