"""Before the first step: is this store fit to be learned from, which mapping, which shape, from scratch or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsdump.draft.config import DrafterConfig, new_config
from hsdump.draft.data import check_final, names_for
from hsdump.draft.model import Drafter, init_drafter
from hsdump.draft.options import TrainOptions
from hsdump.draft.target import Target
from hsdump.draft.vocab import DraftVocab, default_vocab, load_vocab
from hsdump.errors import InputError, StoreError, UsageError
from hsdump.store import Store
from hsdump.verify import VerifyOptions, verify_store
from hsdump.verify.proof_file import NOT_PROVED, PROVED, proof_standing

LOOKED_AT = 64
"""Samples that are verified before training. Enough to catch a broken capture; `hsdump verify` reads all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Where a training takes what from."""

    store: Path
    out: Path
    vocab: Path | None = None
    model: str | None = None
    """The target's folder; None: where the store says it was."""

    from_drafter: Path | None = None
    unproved: bool = False
    """Learn from a store that is neither proved nor clean."""


def check_store(path: Path, *, unproved: bool) -> list[str]:
    """Refuse states that nobody vouches for.

    A store is taken when a look at some of its samples finds nothing and `hsdump prove` proved its states to be the
    server's. States of the embedded engine need no such proof, since their meaning was proved by numbers when it
    started; where somebody held them against a server and they were not its own, they are refused like any others.

    Returns:
        Notes for the log.

    Raises:
        StoreError: it is not fit, and `unproved` is not set.
    """
    report = verify_store(path, VerifyOptions(sample=LOOKED_AT, seed=0), lambda _samples, _bytes: None)
    problems = []
    if report.verdict != "clean":
        problems.append(f"`hsdump verify` finds it {report.verdict}: {', '.join(sorted(report.counts))}")
    with Store(path) as store:
        embedded = store.manifest.engine == "transformers"
        verdict = proof_standing(store)
    notes = [f"verified: {report.samples} samples looked at, {report.verdict}", f"proof: {verdict}"]
    if verdict == NOT_PROVED or (verdict != PROVED and not embedded):
        problems.append(f"its states are not proved to be the server's ({verdict})")
    if problems and not unproved:
        fix = "run `hsdump verify STORE` and `hsdump prove STORE --server URL`; to train all the same: --unproved"
        raise StoreError(f"{path} is not fit for training: " + "; ".join(problems), fix)
    return [*notes, *(f"trained all the same: {problem}" for problem in problems)]


def choose_vocab(sources: Sources, target_size: int) -> DraftVocab:
    """Take the mapping of the drafter that training goes on from, or the file's.

    A drafter's head has a row for each draft id, so another mapping makes its every row mean another token while all
    figures of training look fine: it is never replaced.

    Raises:
        UsageError: no mapping, or one that is not the drafter's.
    """
    file = sources.vocab or default_vocab(sources.store)
    if sources.from_drafter is not None:
        from hsdump.draft.foreign import read_vocab

        own = read_vocab(sources.from_drafter, target_size)
        if sources.vocab is not None and load_vocab(sources.vocab, target_size).digest != own.digest:
            what = f"--vocab {sources.vocab} is not the mapping that {sources.from_drafter} was trained with"
            fix = "leave --vocab away: a drafter keeps its mapping; see what it covers with `hsdump vocab STORE --from`"
            raise UsageError(what, fix)
        return own
    if not file.exists():
        raise UsageError(f"there is no draft vocabulary {file}", f"make one: hsdump vocab {sources.store} --size N")
    return load_vocab(file, target_size)


def build(sources: Sources, options: TrainOptions) -> tuple[Drafter, Target, dict[str, Any]]:
    """Make the drafter that training begins with.

    Returns:
        The drafter, its target, and the facts of `drafter.json`.

    Raises:
        InputError: the target is not the one that the states came from.
        UsageError: the store lacks a layer, or options do not fit.
    """
    with Store(sources.store) as store:
        manifest = store.manifest
    check_final(sources.store, manifest.final_state)
    layers = list(options.layers or manifest.layers)
    names_for(layers, manifest.shape.names)
    folder = sources.model or manifest.model_path
    target = Target(folder)
    if (target.checkpoint.hidden_size, target.checkpoint.num_layers) != (manifest.hidden_size, manifest.num_layers):
        what = f"{folder} has {target.checkpoint.num_layers} layers of width {target.checkpoint.hidden_size}"
        shape = f"{manifest.num_layers} layers of width {manifest.hidden_size}"
        raise InputError(f"{what}, the store's states have {shape}", "name the target of this store with --model")
    vocab = choose_vocab(sources, target.vocab_size)
    facts = {
        "vocab_size": target.vocab_size,
        "draft_vocab_size": vocab.size,
        "layers": layers,
        "num_target_layers": manifest.num_layers,
        "target_class": manifest.model_class,
        "target_path": str(Path(folder).resolve()),
        "target_digest": manifest.model_digest,
        "store_engine": f"{manifest.engine} {manifest.engine_version}",
    }
    config, drafter = _drafter(sources, options, target, vocab, facts)
    return drafter, target, {"config": config, "vocab": {"digest": vocab.digest, **vocab.facts}}


def _drafter(
    sources: Sources, options: TrainOptions, target: Target, vocab: DraftVocab, facts: Mapping[str, Any]
) -> tuple[DrafterConfig, Drafter]:
    if sources.from_drafter is not None:
        from hsdump.draft.foreign import read_drafter

        config, drafter = read_drafter(sources.from_drafter, target, vocab, facts)
        return config, drafter
    config = new_config(target.checkpoint, options.widths, facts)
    drafter = Drafter(config, vocab)
    init_drafter(drafter, target.head_rows(vocab.target_ids), target.embeddings(), options.seed)
    return config, drafter
