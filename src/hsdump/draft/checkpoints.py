"""A drafter's folder, in which everything shows up complete or not at all.

    drafter.json        shape, layers, vocabulary digest, settings
    vocab.safetensors   d2t, t2d
    checkpoints/step-N/ weights.safetensors (float32), optimizer.safetensors, state.json
    last.json best.json which of them to go on with, and which to use
    progress.csv        a line every few steps

A kill at any moment leaves the pointers at complete checkpoints; what no pointer names is swept by the next save.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hsdump.draft.config import DrafterConfig
from hsdump.draft.model import Drafter
from hsdump.draft.target import Target
from hsdump.draft.vocab import load_vocab
from hsdump.errors import InputError

DRAFTER, VOCAB, STEPS = "drafter.json", "vocab.safetensors", "checkpoints"
WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"


class State(msgspec.Struct, kw_only=True):
    """Where a training is, behind the step whose folder holds this."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """Batches of this epoch that are done."""

    tokens: int = 0
    best: float = -1.0
    best_step: int = 0
    worse: int = 0
    """Validations since the best one."""

    validation: dict[str, Any] = {}
    finished: str = ""
    """Why it ended; empty while it has not."""


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that shows up complete."""
    partial = path.with_name(f"{path.name}.{uuid4().hex}.partial")
    with partial.open("xb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    _sync(path.parent)


def save_step(
    folder: Path, state: State, weights: dict[str, Tensor], optimizer: dict[str, Tensor], *, best: bool
) -> None:
    """Write a checkpoint, then the pointers to it, then remove what nobody points to."""
    steps = folder / STEPS
    steps.mkdir(parents=True, exist_ok=True)
    name = f"step-{state.step:08d}"
    partial = steps / f"{name}.{uuid4().hex}.partial"
    partial.mkdir()
    for file, tensors in ((WEIGHTS, weights), (OPTIMIZER, optimizer)):
        save_file({key: value.contiguous() for key, value in tensors.items()}, partial / file)
        _sync_file(partial / file)
    write_json(partial / STATE, state)
    shutil.rmtree(steps / name, ignore_errors=True)  # of a run that was killed between here and the pointer
    partial.replace(steps / name)
    _sync(steps)
    if best:
        write_json(folder / "best.json", {"step": state.step, "folder": name})
    write_json(folder / "last.json", {"step": state.step, "folder": name})
    kept = {pointed(folder, which) for which in ("last", "best")}
    for stray in steps.iterdir():
        if stray not in kept:
            shutil.rmtree(stray, ignore_errors=True)


def pointed(folder: Path, which: str) -> Path | None:
    """Give the checkpoint that `last` or `best` points to."""
    try:
        name = msgspec.json.decode((folder / f"{which}.json").read_bytes(), type=dict[str, Any])["folder"]
    except FileNotFoundError:
        return None
    except (OSError, KeyError, msgspec.MsgspecError) as error:
        raise InputError(f"{folder / which}.json cannot be read: {error}", "train anew into another --out") from error
    if "/" in str(name) or str(name).startswith("."):
        raise InputError(f"{folder / which}.json points outside of its folder: {name}", "train anew")
    return folder / STEPS / str(name)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file.

    Raises:
        InputError: it is missing or damaged.
    """
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read: {error}", "name a drafter folder that is complete") from error
    return tensors


def read_config(folder: Path) -> tuple[DrafterConfig, dict[str, Any]]:
    """Read a drafter's shape, and all that `drafter.json` says.

    Raises:
        InputError: not a folder of `hsdump train`.
    """
    try:
        facts = msgspec.json.decode((folder / DRAFTER).read_bytes(), type=dict[str, Any])
        return msgspec.convert(facts["config"], DrafterConfig), facts
    except (OSError, KeyError, msgspec.MsgspecError) as error:
        raise InputError(
            f"{folder} is no drafter: {error}", "name the folder that `hsdump train --out` wrote"
        ) from error


def load_drafter(folder: Path, which: str = "best", model: str | Path | None = None) -> tuple[Drafter, dict[str, Any]]:
    """Build a trained drafter, float32 on the CPU.

    Args:
        which: `best` or `last`.
        model: the target's folder, where it has moved; its embeddings are read unless the drafter has its own.

    Returns:
        The drafter, and what `drafter.json` says.

    Raises:
        InputError: the folder holds no complete drafter.
    """
    config, facts = read_config(folder)
    drafter = Drafter(config, load_vocab(folder / VOCAB, config.vocab_size))
    place = pointed(folder, which) or pointed(folder, "last")
    if place is None:
        raise InputError(f"{folder} has no checkpoint yet", "let the training go on until its first one")
    fill(drafter, load_tensors(place / WEIGHTS), str(place))
    if not config.own_embeddings:
        with torch.no_grad():
            drafter.embed_tokens.weight.copy_(torch.from_numpy(Target(model or config.target_path).embeddings()))
    return drafter.eval(), {**facts, "checkpoint": place.name}


def fill(drafter: Drafter, weights: dict[str, Tensor], where: str) -> None:
    """Put weights into a drafter; each must be there, and nothing else.

    Raises:
        InputError: weights are missing, left over, or of another shape.
    """
    wanted = dict(trained(drafter))
    missing, strange = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    wrong = sorted(name for name in wanted.keys() & weights.keys() if wanted[name].shape != weights[name].shape)
    if missing or strange or wrong:
        what = f"{where} does not fit this drafter: missing {missing}, unknown {strange}, other shape {wrong}"
        raise InputError(what, "use weights of the same shape and kind")
    with torch.no_grad():
        for name, value in weights.items():
            wanted[name].copy_(value)


def trained(drafter: Drafter) -> list[tuple[str, Any]]:
    """Name the weights that training changes: all, but embeddings that are the target's."""
    return [(name, weight) for name, weight in drafter.named_parameters() if weight.requires_grad]


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
