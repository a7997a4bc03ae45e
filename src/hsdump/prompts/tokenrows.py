"""Rows that are tokens already: checked, never changed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsdump.prompts.conversation import TokenRow
from hsdump.prompts.options import PromptOptions, RowRefused
from hsdump.samples import TokenSample


def token_sample(row: TokenRow, *, source: str, vocab_size: int | None, options: PromptOptions) -> TokenSample:
    """Take a tokenized row as it is. A row without `loss_mask` is learned from as a whole.

    Raises:
        RowRefused: ids that are no ids, a mask of another length, a mask of zeros only, too long.
    """
    input_ids = _integers("input_ids", row.input_ids)
    if not len(input_ids):
        raise RowRefused("empty", "input_ids is empty")
    if len(input_ids) > options.max_tokens:
        detail = f"{len(input_ids)} tokens, the limit is {options.max_tokens} (--max-tokens)"
        raise RowRefused("too-long", detail)
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        wrong = low if low < 0 else high
        size = "" if vocab_size is None else f", the vocabulary has {vocab_size} tokens"
        raise RowRefused("token-outside-vocabulary", f"token id {wrong}{size}")
    if row.loss_mask is None:
        return TokenSample.make(source, input_ids, np.ones(len(input_ids), dtype=np.uint8))
    mask = _integers("loss_mask", row.loss_mask)
    if len(mask) != len(input_ids):
        raise RowRefused("length-mismatch", f"{len(input_ids)} input_ids but {len(mask)} values in loss_mask")
    if not np.isin(mask, (0, 1)).all():
        raise RowRefused("bad-token-row", "loss_mask has values other than 0 and 1")
    if not mask.any():
        raise RowRefused("no-trainable-tokens", "loss_mask is all zero")
    return TokenSample.make(source, input_ids, mask.astype(np.uint8))


def _integers(name: str, values: Any) -> NDArray[np.int64]:
    if isinstance(values, list) and len(values) == 1 and isinstance(values[0], list):
        values = values[0]  # a batch of one, as tokenizers return it
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise RowRefused("bad-token-row", f"{name} is not a flat list of integers") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        raise RowRefused("bad-token-row", f"{name} is not a flat list of integers")
    return array.astype(np.int64)
