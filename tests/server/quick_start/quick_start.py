"""Test only: SGLang's detokenizer is forked from the launcher, instead of importing all of SGLang a third time.

It makes text of token ids, and nothing of hsdump's is at work in it. Schedulers, where hsdump is, start as always.
"""

from __future__ import annotations

import multiprocessing
from typing import Any


def register() -> None:
    """SGLang calls this in each of its processes, in the launcher before it starts the others."""
    spawned, forked = multiprocessing.Process, multiprocessing.get_context("fork").Process

    def process(*args: Any, **named: Any) -> Any:
        makes_text = getattr(named.get("target"), "__name__", "") == "run_detokenizer_process"
        return (forked if makes_text else spawned)(*args, **named)

    multiprocessing.Process = process  # type: ignore[assignment, misc]
