"""The draft vocabulary: which of the target's tokens the drafter may propose, and the two maps between the ids.

Letters: V = target vocabulary, K = draft vocabulary.

`d2t` int64 [K] holds offsets (target id = draft id + d2t[draft id]), `t2d` bool [V] marks the chosen tokens: what
SGLang, vLLM and the trainers expect. Chosen ids ascend, so both maps say the same; `DraftVocab.checked` proves it for
maps from elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
from numpy.typing import NDArray

from hsdump.arrays import xxh3
from hsdump.errors import InputError, UsageError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DraftVocab:
    """A mapping between draft and target ids, proved consistent."""

    d2t: NDArray[np.int64]
    """[K] offsets."""

    t2d: NDArray[np.bool_]
    """[V]"""

    facts: dict[str, Any] = field(default_factory=dict)
    """How it was made, for people."""

    @property
    def size(self) -> int:
        return len(self.d2t)

    @property
    def target_size(self) -> int:
        return len(self.t2d)

    @property
    def target_ids(self) -> NDArray[np.int64]:
        """[K] ascending target ids; draft id k stands for the k-th."""
        return self.d2t + np.arange(self.size, dtype=np.int64)

    @property
    def digest(self) -> str:
        """xxh3-128 of the maps: equal digests propose the same tokens under the same ids."""
        return xxh3(np.ascontiguousarray(self.d2t, "<i8"), np.ascontiguousarray(self.t2d, np.uint8))

    @classmethod
    def of(cls, target_ids: Iterable[int], target_size: int, **facts: Any) -> DraftVocab:
        """Make the maps of a set of target ids."""
        ids = np.asarray(sorted(target_ids), dtype=np.int64)
        t2d = np.zeros(target_size, dtype=np.bool_)
        t2d[ids] = True
        return cls(d2t=ids - np.arange(len(ids), dtype=np.int64), t2d=t2d, facts=facts)

    @classmethod
    def exact(cls, target_size: int) -> DraftVocab:
        """Give the drafter every token: no mapping needed."""
        return cls.of(range(target_size), target_size, made="exact")

    @classmethod
    def checked(
        cls, d2t: NDArray[Any], t2d: NDArray[Any] | None, target_size: int, where: str, **facts: Any
    ) -> DraftVocab:
        """Take maps from elsewhere after proving that they are a mapping of this vocabulary.

        Raises:
            InputError: offsets that leave the vocabulary, propose a token twice, or disagree with `t2d`.
        """
        if d2t.ndim != 1 or not 1 <= len(d2t) <= target_size or not np.issubdtype(d2t.dtype, np.integer):
            raise _not_a_map(where, f"d2t is {d2t.dtype} {list(d2t.shape)} for a vocabulary of {target_size}")
        ids = d2t.astype(np.int64) + np.arange(len(d2t), dtype=np.int64)
        if ids.min() < 0 or ids.max() >= target_size:
            raise _not_a_map(where, f"it proposes token {int(ids.max())}, the target has {target_size}")
        if (np.diff(ids) <= 0).any():
            raise _not_a_map(where, "its target ids do not ascend: these are ids, not offsets, or a token comes twice")
        made = cls.of(ids.tolist(), target_size, **facts)
        if t2d is not None and (t2d.shape != made.t2d.shape or (t2d.astype(np.bool_) != made.t2d).any()):
            raise _not_a_map(where, "d2t and t2d name different tokens")
        return made

    def covered(self, counts_V: NDArray[np.int64]) -> float:
        """Give the share of counted tokens that the drafter can propose; 1 when there are none."""
        total = int(counts_V.sum())
        return float(counts_V[self.t2d].sum() / total) if total else 1.0


def choose(counts_V: NDArray[np.int64], size: int, always: Iterable[int] = (), *, option: str = "--size") -> DraftVocab:
    """Pick the tokens that the drafter may propose: those in `always`, then the most frequent ones.

    Equal counts go to the lower id, so two machines choose alike. When fewer distinct tokens occur than asked for, the
    rest are the lowest ids that do not occur: byte-pair vocabularies number their most common pieces first.

    Args:
        counts_V: occurrences under the loss mask.
        size: K, in tokens.
        always: ids that are in whatever their count.

    Raises:
        UsageError: a size that is no whole number in 1..V, or too small for the tokens that are always in.
    """
    vocab_size = len(counts_V)
    if vocab_size < 1:
        raise UsageError("the target vocabulary is empty", "name the target's own folder with --model")
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= vocab_size:
        what = f"{option} is {size}, the target vocabulary has {vocab_size} tokens"
        raise UsageError(what, f"choose a whole number in 1..{vocab_size}; 32000 is common")
    kept = sorted(set(always))
    if kept and not 0 <= kept[0] <= kept[-1] < vocab_size:
        raise UsageError(f"special token {kept[-1]} is outside the vocabulary of {vocab_size}", "check --model")
    if len(kept) > size:
        what = f"{option} is {size}, but {len(kept)} special, stop, thinking and tool tokens are always in"
        raise UsageError(what, f"choose {len(kept)} or more")
    rank_V = counts_V.copy()
    rank_V[kept] = np.iinfo(np.int64).max
    chosen = np.argsort(-rank_V, kind="stable")[:size]
    filled = (
        int((counts_V[chosen] == 0).sum() - (counts_V[kept] == 0).sum()) if kept else int((counts_V[chosen] == 0).sum())
    )
    return DraftVocab.of(chosen.tolist(), vocab_size, made="counts", always=len(kept), filled=filled)


def save_vocab(vocab: DraftVocab, path: Path) -> None:
    """Write the maps to one safetensors file that shows up complete, or not at all."""
    from safetensors.numpy import save

    data = save(
        {"d2t": np.ascontiguousarray(vocab.d2t), "t2d": np.ascontiguousarray(vocab.t2d)},
        {"hsdump": msgspec.json.encode({**vocab.facts, "digest": vocab.digest}).decode()},
    )
    partial = path.with_name(f"{path.name}.{uuid4().hex}.partial")
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", "choose another --out") from error
    finally:
        partial.unlink(missing_ok=True)


def default_vocab(store: Path) -> Path:
    """Where `hsdump vocab` puts a store's mapping."""
    return store.with_name(store.name + ".vocab.safetensors")


def load_vocab(path: Path, target_size: int | None = None) -> DraftVocab:
    """Read maps from a safetensors file: one of `hsdump vocab`, or the weights of any EAGLE-3 drafter.

    Args:
        target_size: of the target it shall serve; None takes what the file says.

    Raises:
        InputError: no such file, no maps in it, or maps of another target.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            names = set(file.keys())
            if "d2t" not in names:
                raise InputError(f"{path} holds no d2t", "name a file of `hsdump vocab`, or a drafter with a mapping")
            d2t = file.get_tensor("d2t")
            t2d = file.get_tensor("t2d") if "t2d" in names else None
            facts = msgspec.json.decode((file.metadata() or {}).get("hsdump", "{}"))
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read: {error}", "make it with `hsdump vocab STORE --size N`") from error
    if target_size is None:
        if t2d is None:
            raise InputError(f"{path} has no t2d, so its target vocabulary is unknown", "give --model")
        target_size = len(t2d)
    if t2d is not None and len(t2d) != target_size:
        what = f"{path} is for a target of {len(t2d)} tokens, this one has {target_size}"
        raise InputError(what, "use the mapping of this target, or make one: hsdump vocab STORE --size N")
    return DraftVocab.checked(d2t, t2d, target_size, str(path), **facts)


def _not_a_map(where: str, problem: str) -> InputError:
    return InputError(f"{where} holds no draft vocabulary: {problem}", "make one: hsdump vocab STORE --size N")
