"""`hsdump export --server`: the exported folder in a real engine, before anybody relies on it.

That an engine loads a drafter says little: weights under names that it does not know, or layers that are one off, load
as well. So it answers some prompts, and its own counters have to say that drafts were made and that some were taken.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import nullcontext

import msgspec

from hsdump.draft.bench import Speed, bench
from hsdump.draft.sweep import Launch, last_words, running
from hsdump.errors import ServerError, UsageError

PLACE = "{draft}"


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine did with a drafter."""

    server: str
    engine: str
    found: Speed

    @property
    def problem(self) -> str | None:
        """What is wrong; None when drafts were accepted and no request failed."""
        if self.found.failed:
            return f"{self.found.failed} of {self.found.requests} requests failed"
        if not self.found.drafts:
            return f"{self.server} counted no draft: it serves without a drafter, or does not count"
        if not self.found.acceptance_length or self.found.acceptance_length <= 1.0:
            return f"none of the tokens of {self.found.drafts:,} drafts was accepted"
        return None


def load_and_accept(
    url: str, prompts: Sequence[Sequence[int]], *, launch: Launch | None = None, new_tokens: int = 64, key: str | None
) -> Accepted:
    """Have a server with the drafter answer, greedily, one prompt at a time.

    Args:
        launch: start it first, and end it afterwards; None: it runs.

    Raises:
        ServerError: nothing answers, or the server did not start (the drafter could not be loaded, say).
        UsageError: nothing to ask, or something answers there before it was started.
    """
    if not prompts:
        raise UsageError("there is no prompt to ask", "give --prompts FILE with questions")
    with running(launch, launch.command) if launch is not None else nullcontext():
        try:
            found = bench(url, prompts, concurrencies=[1], new_tokens=new_tokens, key=key)
        except ServerError as error:
            if launch is None:
                raise
            what = f"{error.what}; the engine started and its log says: {last_words(launch)}"
            raise ServerError(what, f"see {launch.log}") from error
    return Accepted(server=url, engine=found.engine, found=found.rows[0])


def with_folder(command: str, folder: str) -> str:
    """Put the exported folder into the command that starts an engine.

    Raises:
        UsageError: there is no place for it.
    """
    if PLACE not in command:
        raise UsageError(f"--launch has no place for the drafter: {command}", f"write {PLACE} where its folder goes")
    return command.replace(PLACE, shlex.quote(folder))
