"""Third stage: the draft vocabulary, a drafter from scratch on the captured states, its export for SGLang."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from benchmarks.story.state import StepFailed, Story, afresh
from benchmarks.train import smoke

from hsdump.draft import attention

COMPILER = ("torch._dynamo", "torch._inductor", "LoweringException", "BackendCompilerFailed", "InductorError", "triton")
"""Words of a failure that dense attention avoids."""

SOUND = {"serve.verify": "clean", "serve.prove": "proved"}


def draft_stage(story: Story) -> None:
    story.step("draft.vocab", 10, lambda: vocabulary(story))
    settle_attention(story)
    story.step("draft.train", 30, lambda: train(story))
    story.step("draft.export", 10, lambda: export(story))


def vocabulary(story: Story) -> dict[str, Any]:
    found = story.hsdump("vocab", story.store, "--size", story.scale.draft_vocab, "--model", story.model)
    names = ("size", "target_size", "coverage_train", "coverage_held_out", "recommended", "command_seconds")
    return {name: found[name] for name in names}


def settle_attention(story: Story) -> None:
    """See whether this GPU's compiler takes flex attention; where it does not, all is dense from here on."""
    if story.device != "cuda":
        return
    heads = dict(zip(story.scale.heads[::2], map(int, story.scale.heads[1::2]), strict=True))
    shape = (heads["--heads"], heads["--kv-heads"], heads["--head-dim"])
    found = story.step("draft.attention", smoke.TIMEOUT_S / 3, lambda: smoke.apart(*shape))
    if not found["works"]:
        only_dense(story, str(found["reason"]))
    elif dense(story):
        attention.refuse("failed in the training")


def dense(story: Story) -> bool:
    return (story.work / "dense-attention").exists()


def only_dense(story: Story, reason: str) -> None:
    """Have this process and those of later calls attend densely."""
    print(f"flex attention does not work here, dense from here on: {reason}", flush=True)
    (story.work / "dense-attention").write_text(reason, encoding="utf-8")
    attention.refuse(reason)


def train(story: Story) -> dict[str, Any]:
    """Train; go on where an earlier call was cut. Without flex attention where a GPU's compiler does not take it."""
    scale = story.scale
    words = ["train", story.store, "--out", story.drafter, "--model", story.model, *scale.train, *scale.heads]
    words += ["--device", story.device, *(["--unproved"] if doubts(story) else [])]
    if not dense(story):
        try:
            return {**drop(story.hsdump(*words)), "doubts": doubts(story)}
        except StepFailed as error:
            if story.device == "cpu" or not any(word in str(error) for word in COMPILER):
                raise
            only_dense(story, str(error))
            afresh(story.drafter)
    found = drop(story.hsdump(*words, "--attention", "dense"))
    return {**found, "doubts": doubts(story), "attention": "dense"}


def doubts(story: Story) -> list[str]:
    """Say what keeps `hsdump train` from taking the store. It is in the figures, and learned from all the same."""
    found = {name: (story.figures(name) or {}).get("verdict", "not done") for name in SOUND}
    if story.engine != "sglang":  # its states need no proof
        found.pop("serve.prove")
    return [f"{name}: {verdict}" for name, verdict in found.items() if verdict != SOUND[name]]


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
