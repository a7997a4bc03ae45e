"""Third stage: the draft vocabulary, a drafter from scratch on the captured states, its export for SGLang."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from benchmarks.story.state import StepFailed, Story, afresh


def draft_stage(story: Story) -> None:
    story.step("draft.vocab", 5, lambda: vocabulary(story))
    story.step("draft.train", 15, lambda: train(story))
    story.step("draft.export", 5, lambda: export(story))


def vocabulary(story: Story) -> dict[str, Any]:
    found = story.hsdump("vocab", story.store, "--size", story.scale.draft_vocab, "--model", story.model)
    names = ("size", "target_size", "coverage_train", "coverage_held_out", "recommended", "command_seconds")
    return {name: found[name] for name in names}


def train(story: Story) -> dict[str, Any]:
    """Train; go on where an earlier call was cut. Without flex attention where a GPU's compiler does not take it."""
    scale, device = story.scale, story.device
    words = ["train", story.store, "--out", story.drafter, "--model", story.model, *scale.train, *scale.heads]
    words += ["--device", device]
    dense = story.work / "dense-attention"
    if not dense.exists():
        try:
            return drop(story.hsdump(*words))
        except StepFailed as error:
            if device == "cpu":
                raise
            print(f"[draft.train] flex attention failed, dense from here on:\n{error}", flush=True)
            dense.write_text(str(error), encoding="utf-8")
            afresh(story.drafter)
    return {**drop(story.hsdump(*words, "--attention", "dense")), "attention": "dense"}


def drop(report: dict[str, Any]) -> dict[str, Any]:
    """Leave the machine's folders out of a report."""
    return {name: value for name, value in report.items() if name not in {"out", "target"}}


def export(story: Story) -> dict[str, Any]:
    afresh(story.work / "drafter-sglang")
    out = story.work / "drafter-sglang"
    found = drop(story.hsdump("export", story.drafter, "--to", "sglang", "--out", out))
    return {**found, "progress": progress(story.drafter / "progress.csv")}


def progress(path: Path) -> list[dict[str, str]]:
    """Give some twenty rows of a training's figures."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return rows[:: max(1, len(rows) // 20)]
