"""Which physical tensor is each captured state? Decided by numbers, on a few short sequences.

The captured states are walked along the checkpoint's own layers: up from the embedding rows to the lowest captured one,
and from the highest one through the last layers and the norm to the final state. Only the layers on these two stretches
are read, whatever the model's size; `depth="all"` walks every layer. What lies between is settled by count and order,
and by neighbours that one layer leads from one to the other.

Letters: B = sequences, S = tokens of each, H = hidden size.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hsdump.arrays import to_float32
from hsdump.errors import InputError
from hsdump.layers import FINAL, FINAL_PRE_NORM, ids_for, meaning_of
from hsdump.schema import EngineInfo
from hsdump.verify.checkpoint import EMBEDDING, FIX, Checkpoint
from hsdump.verify.head import Head
from hsdump.verify.logits import LogitsReport, check_logits
from hsdump.verify.parts import Parts, add_differences
from hsdump.verify.reference import StreamingReference, first_line
from hsdump.verify.rows import row_errors
from hsdump.verify.witness import Answer

SEQUENCES, SEQUENCE_TOKENS = 3, 24

MATCH = 0.1
"""Median relative error of rows up to which a tensor is another. Two implementations in bfloat16 differ by 0.007 to
0.03, the next layer by 0.3 and more in the models tried; the runner-up must be `CLEARLY` farther, too."""

CLEARLY = 2.0

IN_PARTS = (
    "the engine keeps the sum of its layers apart from what each adds to it, and its own auxiliary capture hands out "
    "one of the two. Its drafters get the same: one that only this release will serve can use them (--no-probe), "
    "for any other mend the engine first. SGLang's Gemma 3 does so in 0.5.17 to 0.5.23: "
    "https://github.com/sgl-project/sglang/pull/39286"
)
"""Where a state is a part of what it is said to be."""

MADE_OTHERWISE = (RuntimeError, TypeError, ValueError, AttributeError)
"""What comes of a class of transformers' hundreds that is made otherwise than those tried."""

BEYOND = 2
"""Layers walked beyond the ids that are claimed, so that a tensor off by one or two is found where it is."""


class StateReading(msgspec.Struct, kw_only=True):
    """What one captured state was found to be."""

    state: str
    claimed: str
    """Index into hidden_states that the engine's capture claims."""

    found: str | None = None
    """Index that the numbers say: `0` embeddings, `k`, `final`, or a part of it; None: none of those looked at."""

    error: float | None = None
    """Median relative error of rows against it."""

    runner_up: str | None = None
    runner_up_error: float | None = None
    how: str = ""


class ProbeReport(msgspec.Struct, kw_only=True):
    """The table from hsdump's meaning to the engine's."""

    verdict: str = "can't"
    """`agrees`, `contradicts`, or `can't`."""

    words: list[str] = []
    exit_code: int = 2
    engine: str = ""
    model_class: str = ""
    model_path: str = ""
    num_layers: int = 0
    states: list[StateReading] = []
    errors: dict[str, dict[str, float]] = {}
    """State to index to median relative error, of all pairs that were looked at."""

    engine_ids: list[int] = []
    """The engine's own ids of the captured layers, as its setter took them: for capture and for a drafter's config."""

    table_ids: list[int] | None = None
    """The same by hsdump's built-in table."""

    id_meaning: str = ""
    """What the engine's own ids mean, in words, as found."""

    logits: LogitsReport | None = None
    layers_read: list[int] = []
    tokens: int = 0
    identity: str = ""
    cached: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Captured:
    """States of the probe's sequences."""

    ids: NDArray[np.int64]
    """[B, S]"""

    states: Mapping[str, NDArray[np.float32]]
    """Name to [B, S, H]."""

    answers: Mapping[str, Answer]


def probe_sequences(vocab_size: int, seed: int = 1) -> list[tuple[str, NDArray[np.int64]]]:
    """Make a few sequences of random tokens, with keys that no cache has seen."""
    rng = np.random.default_rng(seed)
    return [
        (secrets.token_hex(16), rng.integers(3, vocab_size, SEQUENCE_TOKENS).astype(np.int64)) for _ in range(SEQUENCES)
    ]


def gather(sequences: Sequence[tuple[str, NDArray[np.int64]]], answers: Mapping[str, Answer], dtype: str) -> Captured:
    """Put the answers of one probe together."""
    names = [*(answers[sequences[0][0]].states or {})]
    states = {
        name: np.stack([to_float32((answers[key].states or {})[name], dtype) for key, _ in sequences]) for name in names
    }
    return Captured(ids=np.stack([ids for _, ids in sequences]), states=states, answers=answers)


class Prober:
    """Identifies captured states against a checkpoint."""

    def __init__(self, info: EngineInfo, model: str, *, depth: str = "ends") -> None:
        """Args:
        depth: `ends`, or `all` to walk every layer.

        Raises:
            InputError: the checkpoint cannot be read.
        """
        self._info, self._depth = info, depth
        self._runs = True
        self._checkpoint = Checkpoint(model)
        self._check_same_model()
        self._errors: dict[str, dict[str, float]] = {}
        self._parts: dict[str, dict[str, float]] = {}
        """The same for parts of hidden states; looked at where a state is none of these as a whole."""
        self._how: dict[tuple[str, str], str] = {}

    def judge(self, captured: Captured) -> ProbeReport:
        """Find out what each state is, and hold that against the claim and against the built-in table."""
        info = self._info
        report = ProbeReport(
            engine=f"{info.engine} {info.engine_version}",
            model_class=info.model_class,
            model_path=info.model_path,
            num_layers=info.num_layers,
            tokens=int(captured.ids.size),
        )
        report.engine_ids = list(info.engine_layers)
        table = ids_for(info.engine, info.model_class, info.shape.layers)
        report.table_ids = list(table) if table is not None else None
        problems = _not_finite(captured)
        self._check_embeddings(captured)
        self._walk(report, captured)
        report.errors = self._errors
        report.states = [self._reading(name) for name in captured.states]
        self._settle_between(report, captured)
        self._check_logits(report, captured, problems)
        problems += [_contradiction(reading) for reading in report.states if _contradicts(reading)]
        if any(_contradicts(one) and one.found in self._parts.get(one.state, {}) for one in report.states):
            problems.append(IN_PARTS)
        problems += self._check_ids(report)
        own, served = self._checkpoint.raw_config.get("architectures"), info.model_class
        if isinstance(own, list) and served not in own:
            report.words.append(f"the server runs a {served}, the config of {self._checkpoint.folder} names {own}")
        _conclude(report, problems, "walk every layer with --depth all" if self._runs and self._depth != "all" else "")
        return report

    def _check_same_model(self) -> None:
        """Refuse a checkpoint that cannot be the served one.

        Raises:
            InputError: it is of another depth or width.
        """
        info, checkpoint = self._info, self._checkpoint
        served, named = (info.num_layers, info.shape.hidden_size), (checkpoint.num_layers, checkpoint.hidden_size)
        if served != named:
            raise InputError(
                f"the served model has {served[0]} layers of width {served[1]}, {checkpoint.folder} has {named[0]} of "
                f"width {named[1]}: it is another model's checkpoint",
                FIX,
            )

    def _walk(self, report: ProbeReport, captured: Captured) -> None:
        """Hold the states against what the checkpoint's own layers compute, as far as they can be run."""
        reference = None
        try:
            reference = StreamingReference(self._checkpoint)
            self._walk_up(captured, reference)
            self._walk_to_final(captured, reference)
        except (InputError, *MADE_OTHERWISE) as error:
            self._runs = False
            why = error.what if isinstance(error, InputError) else f"{type(error).__name__}: {first_line(error)}"
            report.words.append(f"the checkpoint's layers cannot be run here: {why}")
        if reference is not None:
            report.layers_read = sorted(set(reference.seen_layers))

    def _note(
        self,
        name: str,
        index: str,
        found_BSH: Any,
        expected_BSH: Any,
        how: str,
        *,
        errors: dict[str, dict[str, float]] | None = None,
    ) -> float:
        """Remember how far a state is from a candidate."""
        width = self._info.shape.hidden_size
        found, expected = np.asarray(found_BSH).reshape(-1, width), np.asarray(expected_BSH).reshape(-1, width)
        error = float(np.median(row_errors(found, expected)))
        known = (self._errors if errors is None else errors).setdefault(name, {})
        if error < known.get(index, np.inf):
            known[index] = error
            self._how[name, index] = how
        return error

    def _check_embeddings(self, captured: Captured) -> None:
        """Hold every state against the embedding rows; only these rows are read."""
        name = self._checkpoint.find(EMBEDDING)
        if name is None:
            return
        rows = self._checkpoint.rows(name, captured.ids.reshape(-1)) * self._checkpoint.embedding_factor
        for state, values in captured.states.items():
            self._note(state, "0", values, rows, "embedding rows")

    def _walk_up(self, captured: Captured, reference: StreamingReference) -> None:
        """From the embeddings up, layer by layer, as far as the lowest captured state or a little beyond."""
        layers = self._info.shape.layers
        last = self._info.num_layers if self._depth == "all" else min(layers[0] + BEYOND, self._info.num_layers)
        parts: Parts = {}
        start = reference.embed(captured.ids)
        hidden = reference.run(start, 0, last, parts)
        add_differences({0: start, **hidden}, parts, self._info.num_layers)
        how = "layers from the embeddings"
        for state, found in captured.states.items():
            for index, values in hidden.items():
                label = FINAL if index == self._info.num_layers else str(index)
                self._note(state, label, found, values.float().numpy(), how)
            for label, meant in parts.items():
                for values in meant:
                    self._note(state, label, found, values.float().numpy(), how, errors=self._parts)

    def _walk_to_final(self, captured: Captured, reference: StreamingReference) -> None:
        """From the highest captured state on, supposing that it is k: the last layers and the norm must give the
        captured final state. The k that does is what it is.
        """
        final = captured.states.get(FINAL)
        layers, depth = self._info.shape.layers, self._info.num_layers
        if final is None or self._depth == "all":
            return
        name = f"layer{layers[-1]}"
        if name not in captured.states or depth - layers[-1] > 8:
            return
        start = reference_tensor(captured.states[name])
        for supposed in range(max(0, layers[-1] - 1), depth):
            if supposed > layers[-1] + 1:
                break
            reached = reference.run(start, supposed, depth)[depth].float().numpy()
            how = f"layers {supposed}..{depth - 1} and the norm lead from it to the final state"
            error = self._note(name, str(supposed), reached, final, how)
            if supposed == layers[-1]:
                self._note(FINAL, FINAL, reached, final, f"reached from {name}")
                for state, other in captured.states.items():
                    if state not in (FINAL, name) and error > MATCH:
                        self._note(state, FINAL, reached, other, f"reached from {name}")
        normed = reference.norm(start).float().numpy()
        self._note(name, "before the norm", normed, final, "its norm is the final state")

    def _reading(self, name: str) -> StateReading:
        claimed = FINAL if name == FINAL else name.removeprefix("layer")
        reading = StateReading(state=name, claimed=claimed)
        whole = self._errors.get(name, {})
        self._decide(reading, whole)
        if reading.found is None and name in self._parts:
            part = StateReading(state=name, claimed=claimed)
            self._decide(part, {**whole, **self._parts[name]})
            return part if part.found is not None else reading
        return reading

    def _decide(self, reading: StateReading, errors: Mapping[str, float]) -> None:
        """Note the nearest candidate and the one behind it; the nearest is what it is, if it is near and alone."""
        ordered = sorted(errors.items(), key=lambda pair: pair[1])
        if not ordered:
            return
        best, error = ordered[0]
        if len(ordered) > 1:
            reading.runner_up, reading.runner_up_error = ordered[1]
        reading.error = error
        if error <= MATCH and (reading.runner_up_error is None or reading.runner_up_error >= CLEARLY * error):
            reading.found, reading.how = best, self._how[reading.state, best]

    def _settle_between(self, report: ProbeReport, captured: Captured) -> None:
        """Between two ends that agree, states in the order of their ids are those ids: each must be nearer to its
        neighbours than the ends are to each other, and no two the same.
        """
        aux = [reading for reading in report.states if reading.claimed.isdecimal()]
        ends = [reading for reading in (aux[:1] + aux[-1:]) if reading.found == reading.claimed]
        if len(ends) < 2 and len(aux) > 1:
            return
        for before, reading, after in zip(aux, aux[1:], aux[2:], strict=False):
            if reading.found is not None or reading.claimed in self._errors.get(reading.state, {}):
                continue  # found, or held against what it claims to be and not found to be that
            distance = {
                (a.state, b.state): _distance(captured.states[a.state], captured.states[b.state])
                for a, b in ((before, reading), (reading, after), (before, after))
            }
            outer = distance[before.state, after.state]
            if 0 < distance[before.state, reading.state] < outer and 0 < distance[reading.state, after.state] < outer:
                reading.found, reading.how = reading.claimed, "count and order, between ends that agree"
                reading.error = reading.runner_up = reading.runner_up_error = None

    def _check_logits(self, report: ProbeReport, captured: Captured, problems: list[str]) -> None:
        """The head on the final states must give the server's log-probabilities."""
        try:
            head = Head(self._checkpoint, self._info.vocab_size)
            dtype, final = self._info.shape.dtype, self._info.shape.final_state
            finals = {
                key: head.post_norm((answer.states or {})[FINAL], dtype, "pre_norm" if final == "pre_norm" else final)
                for key, answer in captured.answers.items()
            }
            report.logits = check_logits(head, dtype, finals, captured.answers)
        except (InputError, KeyError) as error:
            report.words.append(f"no log-probabilities: {error.what if isinstance(error, InputError) else error}")
            return
        problems += report.logits.problems
        reading = next((one for one in report.states if one.state == FINAL), None)
        if reading is not None and reading.found is None and not report.logits.problems:
            reading.found, reading.how = FINAL, "log-probabilities by the checkpoint's head"

    def _check_ids(self, report: ProbeReport) -> list[str]:
        """Hold the engine's own ids against the built-in table and against the numbers."""
        own = report.engine_ids
        if not own:
            return []
        told = list(meaning_of(self._info.engine, self._info.model_class, own))
        aux = [one for one in report.states if one.claimed.isdecimal()]
        numbers = [int(one.found) for one in aux if one.found is not None and one.found.isdecimal()]
        complete = len(numbers) == len(aux)
        report.id_meaning = _meaning(own, numbers if complete else told)
        if complete and numbers != told:
            return [f"the engine's own ids {own}: by hsdump's table they are {told}, by the numbers {numbers}"]
        return []


def reference_tensor(values_BSH: NDArray[np.float32]) -> Any:
    """Hand numbers to torch."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(values_BSH))


def _distance(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    width = one.shape[-1]
    return float(np.median(row_errors(one.reshape(-1, width), other.reshape(-1, width))))


def _contradicts(reading: StateReading) -> bool:
    return reading.found is not None and reading.found != reading.claimed and reading.state != FINAL_PRE_NORM


def _contradiction(reading: StateReading) -> str:
    return (
        f"{reading.state}: the capture claims hidden_states[{reading.claimed}], the numbers say {reading.found} "
        f"(relative error {reading.error:.3g}, {reading.how})"
    )


def _meaning(own: Sequence[int], indices: Sequence[int]) -> str:
    shifts = {index - ident for ident, index in zip(own, indices, strict=False)}
    names = {0: "id k is the input of layer k", 1: "id k is the output of layer k"}
    return names.get(shifts.pop(), "irregular") if len(shifts) == 1 else "irregular"


def _not_finite(captured: Captured) -> list[str]:
    counts = {name: int((~np.isfinite(state).all(axis=-1)).sum()) for name, state in captured.states.items()}
    total = captured.ids.size
    return [f"{name} holds NaN or infinity in {rows} of {total} rows" for name, rows in counts.items() if rows]


def _conclude(report: ProbeReport, problems: list[str], advice: str) -> None:
    open_ones = [
        reading.state for reading in report.states if reading.found is None and reading.state != FINAL_PRE_NORM
    ]
    report.words = problems + report.words
    if problems:
        report.verdict, report.exit_code = "contradicts", 1
    elif open_ones:
        report.words.append(f"not identified: {', '.join(open_ones)}" + (f"; {advice}" if advice else ""))
        report.verdict, report.exit_code = "can't", 2
    else:
        report.verdict, report.exit_code = "agrees", 0
