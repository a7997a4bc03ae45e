"""What a hand-over gives for one request, whichever way the rows came.

Letters: S = tokens of one request, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hsdump.arrays import StateArray


@dataclass(frozen=True, slots=True)
class Rows:
    """All rows of one request."""

    token_ids: NDArray[np.int64]
    """[S] as the model saw them."""

    states: tuple[StateArray, ...]
    """L+1 arrays [S, H], views of shared memory until `release`."""

    release: Callable[[], None]

    in_spool: bool = True
    """They are that memory, and not a copy in this process."""
