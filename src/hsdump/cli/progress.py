"""The progress bar of commands that read or write a whole store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def byte_progress(name: str, total: int | None = None) -> Iterator[Callable[[int, int], None]]:
    """Show samples, bytes, rate and time left on standard error, where that is a terminal.

    Args:
        total: bytes in all; None when that is not known.

    Yields:
        What to call with the samples and bytes done since the last call.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.fields[samples]} samples"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(name, total=total, samples=0)
        seen = 0

        def tick(samples: int, num_bytes: int) -> None:
            nonlocal seen
            seen += samples
            bar.update(task, advance=num_bytes, samples=seen)

        yield tick


@contextmanager
def count_progress(name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show how many things are done, on standard error, where that is a terminal.

    Yields:
        What to call with the number done so far.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.completed} " + name), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(name, total=total)
        yield lambda done: bar.update(task, completed=done)
