"""How often each token occurs where the drafter learns, and what a draft vocabulary of each size would cover.

Letters: V = target vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hsdump.draft.split import is_held_out
from hsdump.draft.vocab import DraftVocab, choose
from hsdump.errors import InputError
from hsdump.store import Store

RECOMMENDED_COVERAGE = 0.995
"""Of held-out tokens. A token outside the draft vocabulary ends a draft for certain, whatever the drafter learned."""

RESERVED = re.compile(r"reserved|unused|placeholder|<extra_id_", re.IGNORECASE)
"""Special tokens that no template uses; some tokenizers have hundreds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Occurrences under the loss mask."""

    train: NDArray[np.int64]
    """[V]"""

    held_out: NDArray[np.int64]
    """[V] of samples that training never sees."""

    samples: int
    held_out_samples: int


def count_tokens(store: Store, held_out: float, progress: Callable[[int, int], None]) -> Counts:
    """Count what is under the loss mask; states are not read.

    Args:
        held_out: share of the samples that is counted apart, the same ones that training validates on.
        progress: called with samples and bytes.

    Raises:
        InputError: nothing is learned from in this store.
    """
    size = store.manifest.vocab_size
    counts = {False: np.zeros(size, np.int64), True: np.zeros(size, np.int64)}
    samples = {False: 0, True: 0}
    for position in range(len(store)):
        key, ids, mask = store.tokens(position)
        apart = is_held_out(key, held_out)
        counts[apart] += np.bincount(ids[mask != 0], minlength=size)
        samples[apart] += 1
        progress(1, ids.nbytes + mask.nbytes)
    if not counts[False].sum():
        what = f"{store.path}: no token of its {len(store)} samples is under the loss mask"
        raise InputError(what, "see what the masks are: hsdump prepare INPUT --show 3")
    return Counts(train=counts[False], held_out=counts[True], samples=samples[False], held_out_samples=samples[True])


def special_tokens(model: str | Path) -> dict[int, str]:
    """Give the tokens that are always in: special, stop, thinking and tool tokens of the target.

    Returns:
        Target id to text.

    Raises:
        InputError: the model's tokenizer cannot be read.
    """
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(model), trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        what = f"{model}: its tokenizer cannot be read ({str(error).splitlines()[0]})"
        raise InputError(what, "name the target's folder with --model") from error
    found = {
        int(number): str(token.content)
        for number, token in tokenizer.added_tokens_decoder.items()
        if not RESERVED.search(str(token.content))
    }
    found |= {int(number): str(tokenizer.convert_ids_to_tokens(int(number))) for number in tokenizer.all_special_ids}
    for number in _stop_ids(Path(model)):
        found.setdefault(number, str(tokenizer.convert_ids_to_tokens(number)))
    return found


def _stop_ids(folder: Path) -> set[int]:
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if path.is_file():
            config: dict[str, Any] = msgspec.json.decode(path.read_bytes())
            ids = config.get("eos_token_id")
            found |= set(ids) if isinstance(ids, list) else {ids} if isinstance(ids, int) else set()
    return found


def curve(counts: Counts, always: set[int]) -> list[dict[str, Any]]:
    """Give the coverage of sizes: halves of the vocabulary down to the always-in tokens, and the common round ones."""
    size = len(counts.train)
    sizes = {size >> shift for shift in range(12)} | {1000 * k for k in (4, 8, 16, 32, 64, 128)}
    rows = []
    for one in sorted(sizes):
        if max(len(always), 1) <= one <= size:
            vocab = choose(counts.train, one, always)
            rows.append(
                {
                    "size": one,
                    "train": vocab.covered(counts.train),
                    "held_out": vocab.covered(counts.held_out) if counts.held_out_samples else None,
                }
            )
    return rows


def recommended(rows: list[dict[str, Any]]) -> int:
    """Give the smallest size of a curve that covers `RECOMMENDED_COVERAGE`, of held-out tokens where there are some."""
    for row in rows:
        if (row["train"] if row["held_out"] is None else row["held_out"]) >= RECOMMENDED_COVERAGE:
            return int(row["size"])
    return int(rows[-1]["size"])


def coverage_facts(vocab: DraftVocab, counts: Counts) -> dict[str, Any]:
    """Say what a mapping covers of these tokens."""
    missed = np.where(vocab.t2d, 0, counts.train + counts.held_out)
    worst = np.argsort(-missed, kind="stable")[:10]
    return {
        "size": vocab.size,
        "target_size": vocab.target_size,
        "coverage_train": vocab.covered(counts.train),
        "coverage_held_out": vocab.covered(counts.held_out) if counts.held_out_samples else None,
        "distinct_train": int((counts.train > 0).sum()),
        "missed": [{"id": int(one), "count": int(missed[one])} for one in worst if missed[one]],
    }
