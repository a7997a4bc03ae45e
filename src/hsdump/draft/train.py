"""`hsdump train`: put the parts together, begin or go on, and say what came out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hsdump._version import __version__
from hsdump.draft.begin import Sources, build, check_store
from hsdump.draft.checkpoints import DRAFTER, STATE, VOCAB, State, pointed, read_config, write_json
from hsdump.draft.data import Side
from hsdump.draft.options import RESUME_FREE, TrainOptions
from hsdump.draft.ranks import Ranks, join, leave
from hsdump.draft.trainer import Trainer
from hsdump.draft.vocab import save_vocab
from hsdump.errors import UsageError
from hsdump.torch import HiddenStateDataset


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a training left."""

    out: str
    steps: int
    tokens: int
    finished: str
    best_step: int
    acceptance_length: float | None
    """Of the best checkpoint on held-out samples, by teacher forcing; None without a held-out side."""

    validation: dict[str, Any]
    samples: int
    held_out_samples: int
    notes: list[str]


def train(sources: Sources, options: TrainOptions, *, quiet: bool = False) -> Trained:
    """Train a drafter on a store, or go on where an interrupted training stopped.

    Raises:
        StoreError: nobody vouches for the store.
        UsageError: the folder holds another training, or something else.
    """
    ranks = join(options.device)
    try:
        return _train(sources, options, ranks, quiet=quiet)
    finally:
        leave(ranks)


def _train(sources: Sources, options: TrainOptions, ranks: Ranks, *, quiet: bool) -> Trained:
    notes = check_store(sources.store, unproved=sources.unproved)
    drafter, target, facts = build(sources, options)
    dataset = HiddenStateDataset(sources.store)
    learn, apart = (Side(dataset, options.held_out, apart=side) for side in (False, True))
    settings = msgspec.to_builtins(options)
    facts |= {
        "settings": settings,
        "samples": len(learn),
        "held_out_samples": len(apart),
        "notes": notes,
        "hsdump_version": __version__,
    }
    place = _begin_or_resume(sources.out, facts, ranks)
    if ranks.first and place is None:
        save_vocab(drafter.vocab, sources.out / VOCAB)
        write_json(sources.out / DRAFTER, facts)
    ranks.barrier()
    trainer = Trainer(
        drafter=drafter,
        target=target,
        options=options,
        ranks=ranks,
        learn=learn,
        validate_on=apart,
        out=sources.out,
        state=State() if place is None else msgspec.json.decode((place / STATE).read_bytes(), type=State),
        quiet=quiet or not ranks.first,
    )
    trainer.prepare(place)
    state = trainer.run()
    return Trained(
        out=str(sources.out),
        steps=state.step,
        tokens=state.tokens,
        finished=state.finished,
        best_step=state.best_step or state.step,
        acceptance_length=state.best if state.best >= 0 else None,
        validation=state.validation,
        samples=len(learn),
        held_out_samples=len(apart),
        notes=notes,
    )


def _begin_or_resume(out: Path, facts: dict[str, Any], ranks: Ranks) -> Path | None:
    """Make the folder, or give the checkpoint to go on from.

    Raises:
        UsageError: it holds something else, or was begun with other settings.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file", "name a folder with --out")
    if not (out / DRAFTER).exists():
        if out.exists() and any(entry.suffix != ".partial" and entry.name != VOCAB for entry in out.iterdir()):
            raise UsageError(f"{out} is no drafter and not empty", "name a new or empty folder with --out")
        if ranks.first:
            out.mkdir(parents=True, exist_ok=True)
        return None
    _, before = read_config(out)
    other = _differences(before, facts)
    if other:
        what = f"{out} was begun with other settings:\n    " + "\n    ".join(other)
        raise UsageError(what, "use the same settings to go on, or name another --out")
    return pointed(out, "last")


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    lines = []
    for part in ("config", "settings"):
        old, new = before[part], msgspec.to_builtins(now[part])
        lines += [
            f"{name}: begun with {old.get(name)!r}, now {new.get(name)!r}"
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name) and name not in RESUME_FREE
        ]
    if before["vocab"]["digest"] != now["vocab"]["digest"]:
        lines.append("the draft vocabulary is another one")
    for name in ("samples", "held_out_samples"):
        if before[name] != now[name]:
            lines.append(f"{name}: begun with {before[name]}, now {now[name]}")
    return lines
