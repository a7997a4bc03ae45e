"""A client that tokenizes needs no torch, but where torch is installed the tokenizer library imports it: 260 MB and
some seconds, in a process that runs for days beside a server. Standard library only.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

from hsdump.errors import InputError

T = TypeVar("T")

_QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


class _Process:
    """What this process is."""

    lean = False


def be_lean(lean: bool) -> None:
    """Say whether this process is to do without torch. Only whoever owns the whole process may: transformers looks
    once, at its import, whether torch is there.
    """
    _Process.lean = lean


@contextmanager
def torch_hidden() -> Iterator[None]:
    """Import transformers inside, without its torch in a lean process; does nothing once either is there."""
    if not _Process.lean or "transformers" in sys.modules or "torch" in sys.modules:
        yield
        return
    quiet = os.environ.get(_QUIET)
    os.environ[_QUIET] = "1"  # it would advise to install torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # what Python itself takes for "there is none"
    try:
        yield
    finally:
        del sys.modules["torch"]
        if quiet is None:
            del os.environ[_QUIET]
        else:
            os.environ[_QUIET] = quiet


def apart(function: Callable[..., T], *args: object) -> T:
    """Call a function that needs torch: in a lean process in a child, which gives all its memory back.

    Raises:
        InputError: the child died.
    """
    if not _Process.lean:
        return function(*args)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *args).result()
        except BrokenProcessPool as error:
            what = "the process that computes layers of the model died"
            raise InputError(what, "see that there is memory for one layer, or pass --no-probe") from error
