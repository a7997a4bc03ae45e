"""Are a store's states the server's own? Decided by its log-probabilities, its states and its tokenizer.

The final states go through the checkpoint's own head and are held against the server's prompt log-probabilities of the
same tokens. Where the server captures, it is asked for all states again. Nothing of hsdump's conventions is used.

Letters: S = tokens of one sample, H = hidden size.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hsdump._version import __version__
from hsdump.arrays import StateArray, to_float32
from hsdump.errors import InputError
from hsdump.extract.identity import UNKNOWN, model_digest
from hsdump.layers import FINAL, FINAL_PRE_NORM
from hsdump.schema import StateShape
from hsdump.store.manifest import Manifest
from hsdump.store.reader import Store, StoredSample
from hsdump.verify.checkpoint import Checkpoint
from hsdump.verify.compare import judge, moved_everywhere
from hsdump.verify.differ import Differ, Pair, SampleDiff, StateDiff, explain
from hsdump.verify.head import Head
from hsdump.verify.logits import LogitsReport, check_logits
from hsdump.verify.proof_file import NOT_PROVED, PROOF_NAME, PROVED, proof_standing, store_digest
from hsdump.verify.texts import TextChecker, TextReport
from hsdump.verify.witness import Answer, Witness

MEMORY_BYTES = 8 << 30

IN_PART, CANNOT = "proved in part", "can't"
EXIT_CODES = {PROVED: 0, NOT_PROVED: 1, IN_PART: 2, CANNOT: 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProveOptions:
    """What to look at."""

    samples: int | None = 64
    """None: all."""

    seed: int = 0
    model: str | None = None
    """The served checkpoint; None: where the server says that it read it."""

    text: bool = True
    """False: the tokens never were text."""

    spool: Path | None = None
    api_key: str | None = None


class ProofReport(msgspec.Struct, kw_only=True):
    """A proof, or why there is none. Written into the store as `proof.json`."""

    verdict: str = CANNOT
    words: list[str] = []
    exit_code: int = EXIT_CODES[CANNOT]
    samples: int = 0
    of_samples: int = 0
    tokens: int = 0
    wrong_share_below: float | None = None
    """With 95 % confidence, fewer samples of the store than this share are wrong (3 / samples, all of them right)."""

    logits: LogitsReport | None = None
    states: list[StateDiff] = []
    """The store's states against the server's of now; empty when it captures nothing."""

    states_unknown: str | None = None
    off_samples: list[SampleDiff] = []
    text: TextReport | None = None
    unanswered: dict[str, str] = {}
    is_kept_back: bool = False
    """It says less than the store's own `proof.json`, which stays."""

    engine: str = ""
    model: str = ""
    model_digest: str = ""
    manifest_digest: str = ""
    store_digest: str = ""
    """xxh3 over keys and checksums of all of the store's tensors: what was proved."""

    proved_keys: list[str] = []
    hsdump_version: str = __version__
    created: str = ""


def prove_store(
    path: Path, url: str, options: ProveOptions, tick: Callable[[int, int], None] = lambda _n, _b: None
) -> ProofReport:
    """Prove a sample of a store against the server, and write `proof.json` beside its manifest, unless one that proves
    more of just what the store holds is there.

    Raises:
        ServerError: nobody answers.
        StoreError: no store there.
    """
    with Store(path) as store:
        witness = Witness.meet(url, spool=options.spool, api_key=options.api_key)
        chosen = choose(store, options.samples, options.seed)
        keys = within_memory(store, chosen)
        asked = [(key, np.array(store[key].input_ids)) for key in keys]
        answers = asyncio.run(witness.ask_all(asked, lambda: tick(1, 0)))
        model = options.model or str(witness.facts["model_path"])
        prover = Prover(store.manifest, model, template_of(witness.facts) if options.text else None, text=options.text)
        report = prover.judge(store.__getitem__, answers, witness.info.shape if witness.info else None)
        report.unanswered = witness.failures
        report.of_samples = len(store)
        if len(keys) < len(chosen):
            report.words.append(
                f"{len(keys)} of {len(chosen)} chosen samples were looked at: more do not fit in memory"
            )
        if not report.states and report.states_unknown is None:
            report.states_unknown = witness.no_capture or None
        _settle(report, witness, store.manifest.shape)
        report.store_digest, report.manifest_digest = store_digest(store), store.manifest.digest
        report.is_kept_back = report.exit_code == EXIT_CODES[CANNOT] and proof_standing(store) == PROVED
    if not report.is_kept_back:
        write_proof(path, report)
    return report


def choose(store: Store, wanted: int | None, seed: int) -> list[str]:
    """Choose samples by seed, spread over the whole store."""
    keys = store.keys()
    if wanted is None or wanted >= len(keys):
        return keys
    return random.Random(seed).sample(keys, wanted)  # noqa: S311 - which samples to look at is no secret


def within_memory(store: Store, keys: Sequence[str]) -> list[str]:
    """Keep as many samples as their states and the server's take together of `MEMORY_BYTES`."""
    kept: list[str] = []
    used = 0
    for key in keys:
        used += 2 * store.row(key).record.num_tokens * store.manifest.shape.bytes_per_token
        if kept and used > MEMORY_BYTES:
            break
        kept.append(key)
    return kept


class Prover:
    """Holds samples against a server's answers. The sabotage campaign uses one set of answers many times."""

    def __init__(self, manifest: Manifest, model: str, chat_template: str | None = None, *, text: bool = True) -> None:
        self._manifest, self._model = manifest, model
        self._cannot: str | None = None
        self._head: Head | None = None
        try:
            self._head = Head(Checkpoint(model), manifest.vocab_size)
            self._head.check_width(manifest.hidden_size)
        except InputError as error:
            self._head, self._cannot = None, error.what
        self._texts, self._no_texts = None, None
        if text:
            try:
                self._texts = TextChecker.load(model, chat_template)
            except InputError as error:
                self._no_texts = error.what

    def judge(
        self, load: Callable[[str], StoredSample], answers: Mapping[str, Answer], served: StateShape | None = None
    ) -> ProofReport:
        """Look at all samples that have an answer.

        Args:
            load: gives the store's sample of a key.
            served: of the answers' states; None: as the store's.
        """
        report = ProofReport(samples=len(answers), proved_keys=list(answers), model=self._model)
        report.created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        report.model_digest = model_digest(self._model)
        if not answers:
            report.words = ["the server answered no request"]
            return report
        samples = {key: load(key) for key in answers}
        report.tokens = sum(sample.num_tokens for sample in samples.values())
        problems: list[str] = []
        self._judge_logits(report, samples, answers, problems)
        self._judge_states(report, samples, answers, served or self._manifest.shape, problems)
        self._judge_text(report, samples, problems)
        report.words = problems + report.words
        digests = {report.model_digest, self._manifest.model_digest}
        if len(digests - {UNKNOWN}) == 2:
            report.words.append(f"{self._model} is not byte for byte the checkpoint that the store names as its model")
        if problems:
            report.verdict = NOT_PROVED
        elif report.logits is not None:
            report.verdict = PROVED
            report.wrong_share_below = min(1.0, 3.0 / len(answers))
        report.exit_code = EXIT_CODES[report.verdict]
        return report

    def _judge_logits(
        self,
        report: ProofReport,
        samples: Mapping[str, StoredSample],
        answers: Mapping[str, Answer],
        problems: list[str],
    ) -> None:
        if self._head is None:
            report.words.append(f"can't compare log-probabilities: {self._cannot}")
            return
        manifest = self._manifest
        try:
            finals = {
                key: self._head.post_norm(sample.states[FINAL], manifest.dtype, manifest.final_state)
                for key, sample in samples.items()
            }
            report.logits = check_logits(self._head, manifest.dtype, finals, answers)
        except InputError as error:
            report.words.append(f"can't compare log-probabilities: {error.what}")
            return
        problems += report.logits.problems
        report.words.append(report.logits.summary)

    def _judge_states(
        self,
        report: ProofReport,
        samples: Mapping[str, StoredSample],
        answers: Mapping[str, Answer],
        served: StateShape,
        problems: list[str],
    ) -> None:
        stored = self._manifest.shape
        if served.hidden_size != stored.hidden_size:
            what = f"the server's states are {served.hidden_size} wide, the store's {stored.hidden_size}: another model"
            problems.append(what)
            return
        differ = Differ(self._manifest.model_class, ("the store", "the server"))

        exact = stored.dtype == served.dtype == "bfloat16" and self._manifest.codec != "fp8"

        def load(key: str) -> Pair:
            bits = (_by_meaning(samples[key].states, stored), _by_meaning(answers[key].states or {}, served))
            return Pair(
                key=key,
                source=samples[key].source,
                found={name: to_float32(state, stored.dtype) for name, state in bits[0].items()},
                expected={name: to_float32(state, served.dtype) for name, state in bits[1].items()},
                learned=samples[key].loss_mask.astype(np.bool_),
                bits=bits if exact else None,
            )

        for key, answer in answers.items():
            if answer.states is not None:
                differ.add(load(key))
        if not differ.samples or not differ.common:
            return
        missing = sorted({_meaning(name, stored) for name in stored.names} - set(differ.common))
        if missing:
            report.states_unknown = f"the server does not capture {', '.join(missing)}"
        report.states = differ.states()
        off = differ.off_samples()
        report.off_samples = explain(off[:50], load)
        problems += judge(report.states, report.off_samples, len(off), differ)
        problems += moved_everywhere(report.states, differ, load)
        worst = max(report.states, key=lambda diff: diff.median)
        report.words.append(
            f"captured again: median relative error of rows at most {worst.median:.2g} ({worst.state}), "
            f"worst row {max(diff.worst for diff in report.states):.2g}"
        )

    def _judge_text(self, report: ProofReport, samples: Mapping[str, StoredSample], problems: list[str]) -> None:
        if self._texts is None:
            if self._no_texts:
                report.words.append(f"can't check the tokens' text: {self._no_texts}")
            return
        tuples = [(key, np.array(sample.input_ids), np.array(sample.loss_mask)) for key, sample in samples.items()]
        report.text = self._texts.check(tuples)
        renderer = self._texts.renderer
        for name in ("tokenizer_digest", "template_digest"):
            mine, served = getattr(self._manifest, name), getattr(renderer, name)
            if mine != served:
                report.text.digests.append(f"{name}: the store has {mine}, the served model {served}")
        problems += report.text.problems
        report.words += report.text.digests


def _by_meaning(states: Mapping[str, StateArray], shape: StateShape) -> dict[str, StateArray]:
    return {_meaning(name, shape): state for name, state in states.items()}


def _meaning(name: str, shape: StateShape) -> str:
    """Name a state so that one from before the norm is never held against one from behind it."""
    return FINAL_PRE_NORM if name == FINAL and shape.final_state == "pre_norm" else name


def template_of(facts: Mapping[str, Any]) -> str | None:
    """Read the server's own `--chat-template`, where it is a file that can be read from here."""
    named = facts.get("chat_template")
    try:
        return Path(str(named)).read_text(encoding="utf-8") if named and Path(str(named)).is_file() else None
    except (OSError, UnicodeDecodeError):
        return None


def write_proof(store: Path, report: ProofReport) -> None:
    """Put `proof.json` into the store, whole or not at all."""
    partial = store / f"{PROOF_NAME}.partial"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    partial.replace(store / PROOF_NAME)


def _settle(report: ProofReport, witness: Witness, stored: StateShape) -> None:
    """Name what the verdict does not cover. The final state is proved by log-probabilities, other layers by none."""
    version = witness.facts.get("version") or (witness.info.engine_version if witness.info else "")
    report.engine = f"sglang {version}".strip()
    if report.states_unknown:
        report.words.append(f"auxiliary layers were not looked at: {report.states_unknown}")
    unseen = set(stored.names) - {FINAL, FINAL_PRE_NORM} - {diff.state for diff in report.states}
    if report.verdict == PROVED and unseen:
        report.verdict, report.exit_code, report.wrong_share_below = IN_PART, EXIT_CODES[IN_PART], None
    if report.unanswered:
        first = next(iter(report.unanswered.items()))
        report.words.append(f"{len(report.unanswered)} samples got no answer, such as {first[0]}: {first[1]}")
        if report.verdict in (PROVED, IN_PART):
            report.verdict, report.exit_code = CANNOT, EXIT_CODES[CANNOT]
