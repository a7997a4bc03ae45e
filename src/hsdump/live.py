"""A panel on a terminal while something long goes on, and a line now and then where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

LOG_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Views:
    """The two ways to say how far it is."""

    panel: Callable[[], RenderableType]
    line: Callable[[], str]


class LivePanel:
    """Shows one or the other on standard error; nothing at all when `quiet`."""

    def __init__(self, views: Views, *, quiet: bool = False) -> None:
        self._views, self._quiet = views, quiet
        console = Console(stderr=True)
        self._live: Live | None = None
        self._next_line_s = time.monotonic() + LOG_EVERY_S
        if console.is_terminal and not quiet:
            self._live = Live(get_renderable=views.panel, console=console, refresh_per_second=4, transient=True)

    @contextmanager
    def shown(self) -> Iterator[LivePanel]:
        """Show the panel while the body runs."""
        if self._live is None:
            yield self
            return
        with self._live:
            yield self

    def tick(self) -> None:
        """Print a line when it is time for one and there is no terminal."""
        if self._live is None and not self._quiet and time.monotonic() > self._next_line_s:
            self._next_line_s = time.monotonic() + LOG_EVERY_S
            sys.stderr.write(self._views.line() + "\n")

    def say(self, text: str) -> None:
        """Say something at once, above the panel or as a line of the log."""
        if self._quiet:
            return
        if self._live is not None:
            self._live.console.print(Text(text, style="yellow"))
        else:
            sys.stderr.write(text + "\n")
