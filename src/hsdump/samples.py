"""One prompt as the client sees it: tokens, loss mask, and an identity that survives reordering of the input.

Letters: S = tokens of one sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hsdump.arrays import xxh3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenSample:
    """Tokens that will be sent exactly as they are; nothing downstream tokenizes again."""

    key: str
    """`sample_key` of the two arrays below: 32 hex digits, the sample's only identity."""

    source: str
    """Where it came from, for people: the row's own id, or `file.jsonl:12`."""

    input_ids: NDArray[np.int64]
    """[S]"""

    loss_mask: NDArray[np.uint8]
    """[S] 1 where the target's own text is learned from."""

    @classmethod
    def make(cls, source: str, input_ids: NDArray[np.int64], loss_mask: NDArray[np.uint8]) -> TokenSample:
        return cls(key=sample_key(input_ids, loss_mask), source=source, input_ids=input_ids, loss_mask=loss_mask)


def sample_key(input_ids: NDArray[np.int64], loss_mask: NDArray[np.uint8]) -> str:
    """Identify a sample by content: equal tokens and mask are one sample, whatever the file or the row number.

    A row's own id cannot do this job: files in the field carry one id on different rows.
    """
    ids = np.ascontiguousarray(input_ids, dtype="<i8")
    return xxh3(str(len(ids)).encode(), ids, np.ascontiguousarray(loss_mask, dtype=np.uint8))
