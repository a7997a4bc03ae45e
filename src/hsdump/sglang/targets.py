"""Where hsdump hooks into which SGLang release: one table, and a test by feature for releases it has not seen."""

from __future__ import annotations

import inspect
import pkgutil
import re
from dataclasses import dataclass

TESTED = ("0.5.11", "0.5.23")
"""Oldest and newest release that the capture test has passed on."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Dotted names of the functions to hook."""

    load_model: str = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
    """Afterwards the model's auxiliary capture is switched on, before any CUDA graph is captured."""

    forward: str = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
    """Holds request ids and lengths: under a CUDA graph the batch that reaches the logits processor has lost them."""

    logits: str = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
    """Sees the final post-norm state and the auxiliary states of every row."""

    def all(self) -> tuple[str, str, str]:
        return (self.load_model, self.forward, self.logits)


_TABLE: tuple[tuple[str, str, Targets], ...] = (
    # first release, last release, names
    ("0.5.11", "0.5.23", Targets()),
)

_NEEDED_PARAMETERS = ("input_ids", "hidden_states", "logits_metadata", "aux_hidden_states")


class Unsupported(Exception):
    """This SGLang cannot be hooked; says which feature is missing."""


def targets_for(version: str) -> tuple[Targets, tuple[str, ...]]:
    """Give the names to hook for a release, and notes for the handshake.

    Raises:
        Unsupported: a release outside the table that lacks a feature which the hooks need.
    """
    release = _release(version)
    for first, last, targets in _TABLE:
        if release is not None and _numbers(first) <= release <= _numbers(last):
            _check_features(targets)
            return targets, ()
    targets = _TABLE[-1][2]
    _check_features(targets)
    tested = f"{TESTED[0]}..{TESTED[1]}, the releases hsdump is tested on"
    return targets, (f"SGLang {version} is outside {tested}; its hooks were found by feature",)


def _check_features(targets: Targets) -> None:
    for name in targets.all():
        try:
            found = pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            raise Unsupported(f"{name} does not exist ({error})") from error
        if name == targets.logits:
            missing = [p for p in _NEEDED_PARAMETERS if p not in inspect.signature(found).parameters]
            if missing:
                raise Unsupported(f"{name} has no parameter {', '.join(missing)}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _release(version: str) -> tuple[int, ...] | None:
    """`0.5.12.post1` and `0.5.12+cu129` are 0.5.12; anything odder is unknown."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)(\.post\d+)?(\+[\w.]+)?$", version)
    return tuple(int(part) for part in match.groups()[:3]) if match else None
