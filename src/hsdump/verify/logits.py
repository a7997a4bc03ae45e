"""Final states through the checkpoint's head, against what the server says of the same tokens.

Letters: S = tokens of one sample, R = rows of all samples.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from hsdump.arrays import StateArray
from hsdump.verify.head import Head
from hsdump.verify.witness import Answer

SAMPLE_LIMIT = 0.15
"""Mean error of a sample over the spread of the server's log-probabilities. States of anything else give about 1 and
more, right ones the noise of bfloat16: 0.01 to 0.02 on tiny models, where states differ by 0.9 % and logits are rounded
to 8 bits; 0.15 leaves an order of magnitude for deeper models and quantized servers."""

WINDOW = 16
WINDOW_LIMIT = 0.4
"""The same mean over any 16 rows one after another, so that a missing chunk is not hidden by a long sample."""

WORST_LISTED = 5


class WorstToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token on which the two disagree most."""

    sample: str
    row: int
    token: int
    """The next token, whose log-probability it is."""

    server: float
    ours: float


class LogitsReport(msgspec.Struct, kw_only=True):
    """How far log-probabilities computed from stored states are from the server's, in nats."""

    rows: int
    mean_error: float
    max_error: float
    spread: float
    """Mean difference of the server's log-probabilities of two random tokens: what unrelated states would be off by."""

    top1_agreement: float
    worst: list[WorstToken]
    off_samples: list[str]
    head: str
    """Name of the tensor that was used."""

    skipped_rows: int = 0
    """The server named another token than the one that was sent, as SGLang does for the vocabulary's last id."""

    @property
    def problems(self) -> list[str]:
        if not self.off_samples:
            return []
        what = f"log-probabilities of {len(self.off_samples)} samples are not the server's, such as "
        what += f"{self.off_samples[0]} (mean error over all rows {self.mean_error:.3g} nats, spread {self.spread:.3g})"
        return [what]

    @property
    def summary(self) -> str:
        return (
            f"log-probabilities: mean error {self.mean_error:.2g}, maximum {self.max_error:.2g} nats "
            f"(spread {self.spread:.2g}), top-1 agreement {100 * self.top1_agreement:.1f} %, {self.rows} rows"
            + (f", {self.skipped_rows} rows left out" if self.skipped_rows else "")
        )


def check_logits(
    head: Head, dtype: str, finals: Mapping[str, StateArray], answers: Mapping[str, Answer]
) -> LogitsReport:
    """Compare all rows.

    Args:
        finals: key to post-norm states [S, H].
        answers: key to what the server said, same keys.

    Raises:
        InputError: the head cannot be read.
    """
    keys = list(finals)
    states = np.concatenate([finals[key] for key in keys])
    target_ids = np.concatenate([answers[key].next_ids for key in keys])
    top_ids = np.concatenate([answers[key].top_ids for key in keys])
    server = np.concatenate([answers[key].logprobs for key in keys])
    ours = head.logprobs(states, dtype, target_ids, top_ids)
    told = np.concatenate([answers[key].told for key in keys])
    errors = np.where(told, np.abs(np.nan_to_num(ours.target, nan=np.inf) - server), 0.0)
    spread = _spread(server)
    bounds = np.cumsum([0, *(len(finals[key]) for key in keys)])
    off = [key for at, key in enumerate(keys) if _is_off(errors[bounds[at] : bounds[at + 1]], spread)]
    worst = np.argsort(errors)[::-1][:WORST_LISTED]
    return LogitsReport(
        rows=int(told.sum()),
        mean_error=float(errors.sum() / max(told.sum(), 1)),
        max_error=float(errors.max()),
        spread=spread,
        top1_agreement=float((ours.top_id == top_ids).mean()),
        worst=[_worst(int(row), keys, bounds, target_ids, server, ours.target) for row in worst],
        off_samples=off,
        head=head.name,
        skipped_rows=int((~told).sum()),
    )


def _spread(server: NDArray[np.float64]) -> float:
    """Mean absolute difference of two random entries, from the sorted values."""
    ordered = np.sort(server)
    count = len(ordered)
    if count < 2:
        return 1.0
    weights = 2 * np.arange(count) - count + 1
    return max(float((weights * ordered).sum() * 2 / (count * (count - 1))), 1e-3)


def _is_off(errors: NDArray[np.float64], spread: float) -> bool:
    if errors.mean() > SAMPLE_LIMIT * spread:
        return True
    if len(errors) < WINDOW:
        return False
    sums = np.convolve(errors, np.ones(WINDOW), mode="valid") / WINDOW
    return bool(sums.max() > WINDOW_LIMIT * spread)


def _worst(
    row: int,
    keys: list[str],
    bounds: NDArray[np.int64],
    target_ids: NDArray[np.int64],
    server: NDArray[np.float64],
    ours: NDArray[np.float64],
) -> WorstToken:
    at = int(np.searchsorted(bounds, row, side="right")) - 1
    return WorstToken(
        sample=keys[at],
        row=row - int(bounds[at]),
        token=int(target_ids[row]),
        server=float(server[row]),
        ours=float(ours[row]),
    )
