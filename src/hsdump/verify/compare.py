"""Two stores with the same tokens: how far apart are their states, layer by layer, and what does that mean?"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from hsdump.arrays import to_float32
from hsdump.errors import UsageError
from hsdump.layers import FINAL, FINAL_PRE_NORM
from hsdump.store.format import INPUT_IDS
from hsdump.store.manifest import FACTS, Manifest
from hsdump.store.reader import Store
from hsdump.verify.differ import Differ, Pair, SampleDiff, StateDiff, explain, whole_moves
from hsdump.verify.rows import SAME_SAMPLE

LISTED = 50
"""Samples named in a report; all are counted."""

Progress = Callable[[int, int], None]


class CompareReport(msgspec.Struct, kw_only=True):
    """What a comparison saw."""

    store_a: str
    store_b: str
    verdict: str = "same"
    """`same` (up to rounding), `different`, or `nothing in common`."""

    words: list[str] = []
    """The verdict in sentences."""

    exit_code: int = 0
    samples: int = 0
    tokens: int = 0
    only_a: int = 0
    only_b: int = 0
    sampled_of: int | None = None
    """Samples in common, when not all were looked at."""

    states: list[StateDiff] = []
    matrix: dict[str, dict[str, float]] = {}
    """State of A to state of B to median row error."""

    off_samples: list[SampleDiff] = []
    off_count: int = 0
    facts: list[str] = []
    """Manifest facts that differ."""


class _Both:
    """Samples that two stores share, matched by their tokens."""

    def __init__(self, a: Store, b: Store) -> None:
        self.a, self.b = a, b
        places_b = _by_tokens(b)
        places_a = _by_tokens(a)
        self.pairs = {key: places_b[tokens] for tokens, key in places_a.items() if tokens in places_b}
        self.only_a, self.only_b = len(places_a) - len(self.pairs), len(places_b) - len(self.pairs)
        finals = (a.manifest.final_state, b.manifest.final_state)
        self._names_a, self._names_b = _names(*finals), _names(*finals[::-1])

    def load(self, key: str) -> Pair:
        one, other = self.a[key], self.b[self.pairs[key]]
        dtype_a, dtype_b = self.a.manifest.dtype, self.b.manifest.dtype
        states_a = {self._names_a.get(name, name): state for name, state in one.states.items()}
        states_b = {self._names_b.get(name, name): state for name, state in other.states.items()}
        exact = dtype_a == dtype_b == "bfloat16" and "fp8" not in (self.a.manifest.codec, self.b.manifest.codec)
        return Pair(
            key=key,
            source=one.source,
            found={name: to_float32(state, dtype_a) for name, state in states_a.items()},
            expected={name: to_float32(state, dtype_b) for name, state in states_b.items()},
            learned=one.loss_mask.astype(np.bool_),
            bits=(states_a, states_b) if exact else None,
        )


def compare_stores(
    path_a: Path, path_b: Path, *, samples: int | None = None, seed: int = 0, progress: Progress | None = None
) -> CompareReport:
    """Compare what two stores hold of the same tokens.

    Args:
        samples: look at so many only, chosen by `seed`.

    Raises:
        StoreError: one of them is no store.
        UsageError: states of different width.
    """
    with Store(path_a) as a, Store(path_b) as b:
        if a.manifest.hidden_size != b.manifest.hidden_size:
            raise UsageError(
                f"the states of {path_a} are {a.manifest.hidden_size} wide, those of {path_b} {b.manifest.hidden_size}",
                "compare captures of one model",
            )
        both = _Both(a, b)
        report = CompareReport(store_a=str(path_a), store_b=str(path_b), only_a=both.only_a, only_b=both.only_b)
        report.facts = _facts(a.manifest, b.manifest)
        chosen = list(both.pairs)
        if samples is not None and samples < len(chosen):
            report.sampled_of = len(chosen)
            chosen = random.Random(seed).sample(chosen, samples)  # noqa: S311 - which samples to look at is no secret
        differ = Differ(a.manifest.model_class)
        for key in chosen:
            pair = both.load(key)
            differ.add(pair)
            if progress is not None:
                progress(1, sum(state.nbytes for state in pair.found.values()))
        fill_report(report, differ, both.load)
        return report


def fill_report(report: CompareReport, differ: Differ, load: Callable[[str], Pair]) -> None:
    """Draw the conclusions from what a differ has gathered."""
    report.samples, report.tokens = len(differ.samples), differ.tokens
    if not differ.samples or not differ.common:
        report.verdict, report.exit_code = "nothing in common", 1
        report.words = ["the two hold no sample of the same tokens, or no state of the same name"]
        return
    report.states, report.matrix = differ.states(), differ.matrix()
    off = differ.off_samples()
    report.off_count = len(off)
    report.off_samples = explain(off[:LISTED], load)
    report.words = judge(report.states, report.off_samples, report.off_count, differ)
    report.words += moved_everywhere(report.states, differ, load)
    if not report.words:
        report.words = [_same_words(report.states)]
    else:
        report.verdict, report.exit_code = "different", 1


def judge(states: Sequence[StateDiff], off: Sequence[SampleDiff], off_count: int, differ: Differ) -> list[str]:
    """Say what differs, in sentences; none when nothing does."""
    words = differ.not_finite() + differ.rounded()
    one, other = differ.sides
    for diff in states:
        typical = differ.typical(diff.state)
        if diff.best_match != diff.state and diff.best_match_error < 0.5 * diff.median:
            same = "is" if diff.best_match_error <= SAME_SAMPLE else "is closest to"
            words.append(
                f"{diff.state} of {one} {same} {diff.best_match} of {other} (relative error "
                f"{diff.best_match_error:.3g}, against the same name there {diff.median:.3g})"
            )
        elif typical > SAME_SAMPLE and diff.state == FINAL and differ.is_norm_apart():
            words.append(f"final is before the model's norm in one of {one} and {other}, and after it in the other")
        elif typical > SAME_SAMPLE:
            words.append(f"{diff.state} differs in most samples: median relative error {diff.median:.3g}")
    shifts = [f"{move} (sample {diff.sample})" for diff in off for move in diff.moves]
    if off_count:
        first = off[0]
        text = f"{off_count} of {len(differ.samples)} samples differ by more than rounding, such as {first.sample} "
        text += f"({first.source}): {first.state} rows {first.first}..{first.last}, {first.off_rows} of them off"
        words.append(text)
    if shifts:
        words.append("rows were moved: " + shifts[0])
    return words


def moved_everywhere(states: Sequence[StateDiff], differ: Differ, load: Callable[[str], Pair]) -> list[str]:
    """Where a state differs in most samples and is no other state either, its rows may all have been moved."""
    odd = [diff.state for diff in states if min(differ.typical(diff.state), diff.best_match_error) > SAME_SAMPLE]
    if not odd:
        return []
    moves = whole_moves(odd[-1], [load(key) for key, _ in differ.samples[:2]])
    return [f"rows were moved: {move} ({odd[-1]})" for move in moves[:1]]


def _same_words(states: Sequence[StateDiff]) -> str:
    worst = max(states, key=lambda diff: diff.median)
    if not any(diff.worst for diff in states):
        return "the same bit for bit: one is a copy of the other, or comes from the very same computation"
    text = f"the same up to rounding: median relative error of rows {worst.median:.2g} ({worst.state}), "
    text += f"worst row {max(diff.worst for diff in states):.2g}"
    scattered = sum(diff.off_rows for diff in states)
    return text + (f"; {scattered} scattered rows of rerouted tokens" if scattered else "")


def _names(mine: str, others: str) -> dict[str, str]:
    """Rename a final state from before the norm, where the other store has that one under its own name."""
    return {FINAL: FINAL_PRE_NORM} if (mine, others) == ("pre_norm", "both") else {}


def _by_tokens(store: Store) -> dict[str, str]:
    """Give the checksum of each sample's tokens, and its key."""
    found: dict[str, str] = {}
    for key in store.keys():  # noqa: SIM118 - a Store iterates over samples
        record = store.row(key).record
        checksum = next(entry.checksum for entry in record.tensors if entry.name == INPUT_IDS)
        found.setdefault(checksum, key)
    return found


def _facts(a: Manifest, b: Manifest) -> list[str]:
    """Name the facts in which two stores differ; for comparing, that is the point and no error."""
    return [
        f"{name}: A {getattr(a, name)!r}, B {getattr(b, name)!r}"
        for name in FACTS
        if getattr(a, name) != getattr(b, name)
    ]
