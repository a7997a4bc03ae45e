"""`hsdump eval`: how good a drafter is before any engine has it, by teacher forcing and by decoding for real."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from hsdump.draft.acceptance import Acceptance, measure
from hsdump.draft.chain import Decoding, TargetRunner, Walk, walk
from hsdump.draft.checkpoints import load_drafter
from hsdump.draft.data import Side, align
from hsdump.draft.model import Drafter, init_drafter
from hsdump.draft.target import Target
from hsdump.errors import InputError
from hsdump.prompts import PromptOptions, Renderer, Skip
from hsdump.torch import HiddenStateDataset, TokenBudgetSampler, make_loader

NEAR_TIE = 1e-3
"""Logits that differ by less are a tie: float32 sums of several tokens at once and of one are rounded differently."""


class Forced(msgspec.Struct, frozen=True, kw_only=True):
    """Acceptance from stored states, every position of every answer a start."""

    samples: int
    starts: int
    conditional: list[float]
    per_position: list[float]
    acceptance_length: float


class Walked(msgspec.Struct, frozen=True, kw_only=True):
    """Acceptance of decoding, as an engine counts it."""

    category: str
    prompts: int
    tokens: int
    drafts: int
    per_position: list[float]
    acceptance_length: float


class Evaluation(msgspec.Struct, kw_only=True):
    """What an evaluation found."""

    drafter: str
    checkpoint: str
    draft_tokens: int
    temperature: float = 0.0
    forced: Forced | None = None
    walked: list[Walked] = []
    """All prompts together first, then each category."""

    lossless: bool | None = None
    """Greedy: every output equals the target's own, token by token. None where it was not asked."""

    differing: list[dict[str, Any]] = []
    near_ties: int = 0
    """Of the differing ones, those that part where two tokens are equally good to the target's rounding."""

    untrained: Walked | None = None
    seconds: float = 0.0


def forced(
    drafter: Drafter, store: Path, held_out: float, steps: int, *, everything: bool, tokens: int = 4096
) -> Forced:
    """Measure acceptance on a store's held-out samples, or on all.

    Raises:
        InputError: there is no such sample.
    """
    dataset = HiddenStateDataset(store)
    side = Side(dataset, 0.0 if everything else held_out, apart=not everything)
    if not len(side):
        raise InputError(f"{store} has no held-out sample", "measure on all of them: --all, or on prompts: --prompts")
    target = Target(drafter.config.target_path)
    sampler = TokenBudgetSampler(side.lengths, tokens=max(tokens, int(side.lengths.max())), seed=0)
    names = tuple(f"layer{layer}" for layer in drafter.config.layers)
    loader = make_loader(side, sampler, states=(*names, "final"), workers=0)  # type: ignore[arg-type]  # like the one it wraps
    counted, device = Acceptance(), drafter.d2t.device
    for packed in loader:
        batch = align(packed, drafter.config.layers, device)
        counted.add(*measure(drafter, batch, target.first_choices(batch.final), steps, "auto"))
    return Forced(
        samples=len(side),
        starts=counted.starts[0],
        conditional=counted.conditional,
        per_position=counted.per_position,
        acceptance_length=counted.length(),
    )


def load_target(drafter: Drafter, model: str | None) -> TargetRunner:
    """Load the target through transformers, in float32.

    Raises:
        InputError: it cannot be loaded.
    """
    import transformers

    path = model or drafter.config.target_path
    try:
        target = transformers.AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        what = f"{path} cannot be loaded as a model: {str(error).splitlines()[0]}"
        raise InputError(what, "name the target's folder with --model") from error
    stop = drafter.config.eos_token_id
    stops = [stop] if isinstance(stop, int) else list(stop or [])
    return TargetRunner(target.eval(), drafter.config.layers, stops)


def read_prompts(path: Path, model: str, limit: int | None) -> list[Walk]:
    """Read conversations up to where the target answers, as tokens.

    A row may name its `category`.

    Raises:
        InputError: no row of the file is a question.
    """
    from hsdump.prompts.inputs import read_rows
    from hsdump.prompts.options import RowRefused
    from hsdump.prompts.questions import parse_question

    renderer = Renderer.load(model, PromptOptions())
    walks: list[Walk] = []
    refused: list[str] = []
    for row in read_rows(path):
        if isinstance(row, Skip):
            refused.append(str(row.reason))
            continue
        try:
            _, question = parse_question(row.value, PromptOptions())
            asked = question.turns[: question.turns.index(None)]
            ids = renderer.ask([turn for turn in asked if turn is not None], question.tools).input_ids
        except RowRefused as error:
            refused.append(str(error))
            continue
        category = str(row.value.get("category", "")) if isinstance(row.value, dict) else ""
        walks.append(Walk(prompt=[int(one) for one in ids], category=category))
        if limit is not None and len(walks) == limit:
            break
    if not walks:
        raise InputError(f"{path} holds no question ({refused[0] if refused else 'no rows'})", "see docs/prompts.md")
    return walks


def decode(
    drafter: Drafter,
    target: TargetRunner,
    walks: Sequence[Walk],
    how: Decoding,
    tick: Callable[[int], None] = lambda _done: None,
) -> None:
    """Decode every prompt with drafts, and greedily without for comparison."""
    for done, walked in enumerate(walks, 1):
        if how.temperature <= 0 and not walked.plain:
            with torch.inference_mode():
                walked.plain = target.plain(walked.prompt, how.new_tokens)
        walk(target, drafter, walked, how)
        if how.temperature <= 0 and not walked.lossless:
            walked.near_tie = _margin(target, walked)
        tick(done)


def _margin(target: TargetRunner, walked: Walk) -> float:
    """Say how far apart the target's two best tokens are where two outputs part."""
    place = next(
        (at for at, (one, other) in enumerate(zip(walked.plain, walked.output, strict=False)) if one != other),
        min(len(walked.plain), len(walked.output)),
    )
    with torch.inference_mode():
        logits, _ = target.forward([*walked.prompt, *walked.plain[:place]], target.fresh_cache())
    best = logits[-1].topk(2).values
    return float(best[0] - best[1])


def summed(walks: Sequence[Walk], category: str) -> Walked:
    """Add up what was taken."""
    drafts = sum(one.drafts for one in walks)
    steps = max((len(one.accepted) for one in walks), default=0)
    taken = [sum(one.accepted[step] for one in walks) for step in range(steps)]
    return Walked(
        category=category,
        prompts=len(walks),
        tokens=sum(len(one.output) for one in walks),
        drafts=drafts,
        per_position=[count / max(drafts, 1) for count in taken],
        acceptance_length=1.0 + sum(taken) / max(drafts, 1),
    )


def by_category(walks: Sequence[Walk]) -> list[Walked]:
    """Give all together, then each category that rows name."""
    names = sorted({one.category for one in walks} - {""})
    return [summed(walks, "all"), *(summed([one for one in walks if one.category == name], name) for name in names)]


def untrained(drafter: Drafter, target: Target, seed: int = 0) -> Drafter:
    """Give the drafter that training began with: same shape and mapping, nothing learned."""
    fresh = Drafter(drafter.config, drafter.vocab)
    init_drafter(fresh, target.head_rows(drafter.vocab.target_ids), target.embeddings(), seed)
    fresh.eval()
    return fresh


class EvalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to evaluate on."""

    store: Path | None = None
    everything: bool = False
    prompts: Path | None = None
    limit: int | None = None
    model: str | None = None
    checkpoint: str = "best"
    new_tokens: int = 128
    draft_tokens: int = 3
    temperature: float = 0.0
    seed: int = 0
    untrained: bool = False


def evaluate(folder: Path, options: EvalOptions, tick: Callable[[int], None] = lambda _done: None) -> Evaluation:
    """Evaluate a drafter of `hsdump train`.

    Raises:
        InputError: drafter, store, prompts or target cannot be read.
    """
    began_s = time.monotonic()
    drafter, facts = load_drafter(folder, options.checkpoint, options.model)
    found = Evaluation(
        drafter=str(folder),
        checkpoint=str(facts["checkpoint"]),
        draft_tokens=options.draft_tokens,
        temperature=options.temperature,
    )
    if options.store is not None:
        held_out = float(facts["settings"]["held_out"])
        found.forced = forced(drafter, options.store, held_out, options.draft_tokens, everything=options.everything)
    if options.prompts is not None:
        _evaluate_prompts(found, drafter, options, tick)
    found.seconds = round(time.monotonic() - began_s, 2)
    return found


def _evaluate_prompts(found: Evaluation, drafter: Drafter, options: EvalOptions, tick: Callable[[int], None]) -> None:
    assert options.prompts is not None
    target = load_target(drafter, options.model)
    walks = read_prompts(options.prompts, options.model or drafter.config.target_path, options.limit)
    how = Decoding(
        new_tokens=options.new_tokens,
        draft_tokens=options.draft_tokens,
        temperature=options.temperature,
        seed=options.seed,
    )
    decode(drafter, target, walks, how, tick)
    found.walked = by_category(walks)
    if options.temperature <= 0:
        parted = [(number, one) for number, one in enumerate(walks) if not one.lossless]
        found.lossless = not parted
        found.differing = [{"prompt": number, "margin": one.near_tie} for number, one in parted]
        found.near_ties = sum((one.near_tie or 0.0) < NEAR_TIE for _, one in parted)
    if options.untrained:
        fresh = untrained(drafter, Target(options.model or drafter.config.target_path))
        again = [Walk(prompt=one.prompt, plain=one.plain) for one in walks]
        decode(fresh, target, again, how)
        found.untrained = summed(again, "untrained")
