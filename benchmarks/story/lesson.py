"""Fifth stage: a drafter is as good as the states it learned from. Everything else is equal, and all meet true states.

Each drafter is measured twice against the true states: by teacher forcing on the same held-out samples of the real
store, every position a start, and by decoding questions with the target. Its own validation, on states that are wrong
in the same way, is there to show that training figures do not tell.

Whether hsdump would have stopped it is not asserted but run: `hsdump verify`, `hsdump prove` against the server, and
then the check with which `hsdump train` begins.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.story import serving
from benchmarks.story.drafting import dense, settle_attention
from benchmarks.story.state import OutOfTime, StepFailed, Stopped, Story, afresh
from benchmarks.story.target import compute_densely
from benchmarks.story.together import together
from benchmarks.train import variants

from hsdump.draft.begin import Sources, check_store
from hsdump.draft.chain import Decoding, TargetRunner, Walk
from hsdump.draft.checkpoints import load_drafter
from hsdump.draft.config import Widths
from hsdump.draft.eval import decode, forced, load_target, read_prompts, summed, untrained
from hsdump.draft.model import Drafter
from hsdump.draft.target import Target
from hsdump.draft.train import train
from hsdump.draft.vocab import default_vocab
from hsdump.errors import StoreError

KINDS = (*variants.STORED[:2], *variants.COMPUTED, "prompts-only", "fp8", "half", "quarter")
LEARNED = (KINDS[0], "untrained", *KINDS[1:])
"""Drafters, in the order in which they come."""

DRAFT_TOKENS = 3
BLIND = "were not looked at"
"""What `hsdump prove` says of auxiliary layers where it cannot capture. A verdict without them says less."""

START_S = 100.0
STORES_S, DRAFTER_S, CHECK_S = 130.0, 60.0, 15.0


def lesson_stage(story: Story) -> None:
    """Do all of it in this process."""
    stores_stage(story)
    judge_stage(story)
    learn_stage(story)


def stores_stage(story: Story) -> None:
    story.step("lesson.stores", STORES_S, lambda: stores(story))


def judge_stage(story: Story) -> None:
    try:
        check_all(story)
    except Stopped:
        raise
    except OutOfTime as over:
        story.postpone("lesson.checks", over)
    except Exception as error:  # the judge's server; drafters do not wait for it
        story.note("lesson.checks", error)


def learn_stage(story: Story) -> None:
    """Train and measure drafters: all, or those that this process is asked for."""
    settle_attention(story)
    questions = Questions(story)
    for kind in [kind for kind in LEARNED if kind in (story.kinds or LEARNED)]:
        if kind == "untrained" and story.figures(f"lesson.{KINDS[0]}") is None:
            story.postpone("lesson.untrained", "it has the shape of the sound one, which is not there yet")
            continue
        story.attempt(f"lesson.{kind}", DRAFTER_S, partial(one_drafter, story, kind, questions))


def folder(story: Story, kind: str) -> Path:
    return story.work / f"lesson/store-{kind}"


def stores(story: Story) -> dict[str, Any]:
    """Write a store of each kind, of the same samples."""
    shutil.rmtree(story.work / "lesson", ignore_errors=True)
    (story.work / "lesson").mkdir(parents=True)
    base = folder(story, "base")
    copied = variants.some_of(story.store, base, story.scale.lesson_samples)
    kinds = [kind for kind in KINDS if kind != "fp8"]
    places = {kind: folder(story, kind) for kind in kinds}
    variants.make(base, story.model, places, device=story.device, held_out=story.scale.lesson.held_out)
    recoded = story.hsdump("store", "recode", base, "--codec", "fp8", "--out", folder(story, "fp8"))
    for kind in KINDS:
        shutil.copy(default_vocab(story.store), default_vocab(folder(story, kind)))
    sizes = {
        kind: sum(path.stat().st_size for path in folder(story, kind).rglob("*") if path.is_file()) for kind in KINDS
    }
    return {"samples": copied, "bytes": sizes, "recode_seconds": recoded["command_seconds"]}


def check_all(story: Story) -> None:
    """Have each store judged by hsdump; the server that the states are said to be of runs for it."""
    kinds = [kind for kind in KINDS if story.figures(f"lesson.check-{kind}") is None]
    if not kinds:
        return
    starts = {}
    if story.engine == "sglang":
        story.need(START_S, "starting the server")
        starts["judge"] = partial(story.serve, "judge", *story.scale.prefill_flags, capture=True)
    with together(starts, at_once=1) as urls:
        for kind in kinds:  # one after the other: a server's ring has one reader
            story.attempt(f"lesson.check-{kind}", CHECK_S, partial(check, story, kind, urls.get("judge", "")))


def check(story: Story, kind: str, url: str) -> dict[str, Any]:
    """Run verify, prove where there is a server, and what training would say."""
    path = folder(story, kind)
    verified = serving.trim(story.hsdump("verify", path, codes=(0, 1, 2)))
    found: dict[str, Any] = {"verify": verified["verdict"], "counts": verified.get("counts", {})}
    if url:
        proof = serving.prove(story, path, url)
        if any(BLIND in word for word in proof["words"]):
            raise StepFailed(f"prove could not capture: {proof['words']}")
        found |= {"prove": proof["verdict"], "words": proof["words"][:6], "prove_states": proof.get("states", [])}
    try:
        check_store(path, unproved=False)
        found["train_takes_it"] = True
    except StoreError as error:
        found |= {"train_takes_it": False, "refusal": error.what.replace(str(path), "STORE")}
    return found


class Questions:
    """The questions to decode, the target's plain answers and the target itself, made when first needed."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._walks: list[Walk] = []
        self._runner: TargetRunner | None = None

    def decode(self, drafter: Drafter) -> dict[str, Any]:
        """Decode all of them with a drafter."""
        story = self._story
        if self._runner is None:
            self._runner = load_target(drafter, str(story.model))
            self._runner.model.to(story.device)
            compute_densely(self._runner.model)  # as it was trained; grouped products of float32 are nobody's habit
            limit = story.scale.lesson_prompts
            self._walks = read_prompts(story.data / "test.jsonl", str(story.model), limit)
        again = [Walk(prompt=one.prompt, plain=one.plain) for one in self._walks]
        how = Decoding(new_tokens=story.scale.lesson_new_tokens, draft_tokens=DRAFT_TOKENS)
        decode(drafter, self._runner, again, how)
        self._walks = again
        return dict(msgspec.to_builtins(summed(again, "all")))


def one_drafter(story: Story, kind: str, questions: Questions) -> dict[str, Any]:
    """Train one drafter and measure it on true states."""
    drafted = story.work / f"lesson/drafter-{kind}"
    found: dict[str, Any] = {"kind": kind}
    if kind == "untrained":
        drafter = untrained(
            load_drafter(story.work / "lesson/drafter-sound", model=story.model)[0], Target(story.model)
        )
    else:
        sources = Sources(store=folder(story, kind), out=afresh(drafted), model=str(story.model), unproved=True)
        trained = train(sources, options(story), quiet=True)
        found |= {"steps": trained.steps, "tokens": trained.tokens, "samples": trained.samples}
        found["own_validation"] = trained.acceptance_length
        drafter, _ = load_drafter(drafted, model=story.model)
    drafter.to(story.device)
    held_out = story.scale.lesson.held_out
    found["forced"] = msgspec.to_builtins(
        forced(drafter, folder(story, "base"), held_out, DRAFT_TOKENS, everything=False)
    )
    found["decoded"] = questions.decode(drafter)
    judged = story.figures(f"lesson.check-{kind}") is not None
    if judged and kind != "sound":
        shutil.rmtree(folder(story, kind), ignore_errors=True)  # room for the next ones
    return found


def options(story: Story) -> Any:
    """Give the settings that all drafters share."""
    heads = dict(zip(story.scale.heads[::2], map(int, story.scale.heads[1::2]), strict=True))
    widths = Widths(heads=heads["--heads"], kv_heads=heads["--kv-heads"], head_dim=heads["--head-dim"])
    attention = "dense" if dense(story) else "auto"
    return msgspec.structs.replace(story.scale.lesson, device=story.device, widths=widths, attention=attention)
