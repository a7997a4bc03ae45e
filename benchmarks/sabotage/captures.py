"""What a campaign needs of a server, asked once and kept on disk, so that a long campaign can be ended and go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from benchmarks.sabotage.sabotages import Taken, other_template, shifted_tokenizer

from hsdump.engines.base import CaptureRequest
from hsdump.engines.sglang_http import SglangEngine
from hsdump.prompts import PromptOptions, Renderer, read_samples
from hsdump.samples import TokenSample
from hsdump.schema import EngineInfo
from hsdump.verify.probe import probe_sequences
from hsdump.verify.witness import Answer, Witness

SHORT = 200
"""Characters of a turn, so that many samples fit into a campaign."""

PLANTED = 60
"""Samples among which a fault is planted; the clean ones are all looked at."""

TOKEN_SABOTAGES = ("another chat template", "another tokenizer revision")

_FIELDS = ("logprobs", "next_ids", "told", "top_ids", "top_logprobs")


def capture_all(url: str, model: Path, folder: Path, count: int) -> None:
    """Ask the server everything that a campaign needs of it, and keep the answers."""
    samples = text_samples(model, conversations(count + count // 4 + 10), folder)[:count]
    assert len(samples) == count, f"the demo's prompts make only {len(samples)} samples"
    info, first = ask(url, samples)
    keep(folder / "clean.npz", capture_again(url, samples[::-1])[::-1], first)
    sequences = [
        TokenSample.make("probe", ids, np.ones(len(ids), np.uint8)) for _, ids in probe_sequences(info.vocab_size)
    ]
    keep(folder / "probe.npz", [Taken(one, {}) for one in sequences], ask(url, sequences)[1])
    for number, name in enumerate(TOKEN_SABOTAGES):
        wrong, answers = ask_tokens(url, model, name, samples[:PLANTED])
        keep(folder / f"tokens{number}.npz", [Taken(one, {}) for one in wrong], answers)
    (folder / "info.json").write_bytes(msgspec.json.encode(info))


def capture_again(url: str, samples: Sequence[TokenSample]) -> list[Taken]:
    """Capture without asking for log-probabilities, many requests at a time, as an extraction does."""

    async def run() -> list[Taken]:
        engine, slots = SglangEngine(url), asyncio.Semaphore(16)
        info = engine.handshake()

        async def one(sample: TokenSample) -> Taken:
            async with slots:
                got = await engine.capture(CaptureRequest(key=sample.key, input_ids=sample.input_ids, attempt=0))
            states = {name: state.copy() for name, state in zip(info.shape.names, got.states, strict=True)}
            got.release()
            return Taken(sample, states)

        try:
            return list(await asyncio.gather(*map(one, samples)))
        finally:
            await engine.close()

    return asyncio.run(run())


def ask_tokens(
    url: str, model: Path, name: str, samples: Sequence[TokenSample]
) -> tuple[list[TokenSample], dict[str, Answer]]:
    """Make samples of wrong tokens, and ask the server about them: their states are sound."""
    renderer = Renderer.load(str(model), PromptOptions())
    if name == "another chat template":
        wrong = [_by_other_template(renderer, talk) for talk in conversations(len(samples))]
    else:
        wrong = [shifted_tokenizer(one, renderer.vocab_size) for one in samples]
    wrong = list({one.key: one for one in wrong}.values())
    return wrong, ask(url, wrong)[1]


def conversations(count: int) -> list[list[dict[str, str]]]:
    """Make distinct conversations of the project's own prompts: each a question, its answer, and another pair."""
    path = Path(__file__).parents[2] / "src/hsdump/demo/prompts.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    turns = [row.get("messages") or row.get("conversations") for row in rows]
    plain = [
        [{"role": str(turn["role"]), "content": turn["content"][:SHORT]} for turn in talk]
        for talk in turns
        if talk and all(turn.get("role") in ("user", "assistant") and turn.get("content") for turn in talk)
    ]
    assert len(plain) >= 20, "the demo's prompts have changed their form"
    return [plain[at % len(plain)][:2] + plain[(at * 7 + at // len(plain)) % len(plain)][:2] for at in range(count)]


def text_samples(model: Path, talks: Sequence[list[dict[str, str]]], folder: Path) -> list[TokenSample]:
    """Tokenize by the served model's template, each sample once."""
    path = folder / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks), encoding="utf-8")
    options = PromptOptions(max_tokens=1000)
    rows = read_samples([path], Renderer.load(str(model), options), options)
    return list({row.key: row for row in rows if isinstance(row, TokenSample)}.values())


def ask(url: str, samples: Sequence[TokenSample]) -> tuple[EngineInfo, dict[str, Answer]]:
    """Get states and log-probabilities in one pass."""
    witness = Witness.meet(url)
    assert witness.info is not None, witness.no_capture
    answers = asyncio.run(witness.ask_all([(one.key, one.input_ids) for one in samples]))
    assert not witness.failures, witness.failures
    return witness.info, answers


def taken(samples: Sequence[TokenSample], answers: Mapping[str, Answer]) -> list[Taken]:
    return [Taken(one, dict(answers[one.key].states or {})) for one in samples]


def _by_other_template(renderer: Renderer, talk: list[dict[str, str]]) -> TokenSample:
    ids: list[int] = []
    mask: list[int] = []
    for text, learned in other_template(talk):
        new, _ = renderer.tokens.encode(text, add_special_tokens=False)
        ids += new.tolist()
        mask += [int(learned)] * len(new)
    return TokenSample.make("other-template", np.array(ids, np.int64), np.array(mask, np.uint8))


def keep(path: Path, samples: Sequence[Taken], answers: Mapping[str, Answer]) -> None:
    """Write samples and what the server said of them, whole or not at all.

    Args:
        answers: key to answer; those without one are left out.
    """
    arrays: dict[str, Any] = {"sources": np.array(json.dumps([one.sample.source for one in samples]))}
    for at, one in enumerate(samples):
        arrays |= {f"{at}.ids": one.sample.input_ids, f"{at}.mask": one.sample.loss_mask}
        arrays |= {f"{at}.taken.{name}": state for name, state in one.states.items()}
        answer = answers.get(one.sample.key)
        if answer is not None:
            arrays |= {f"{at}.answer.{name}": getattr(answer, name) for name in _FIELDS}
            arrays |= {f"{at}.said.{name}": state for name, state in (answer.states or {}).items()}
    part = path.with_suffix(".part.npz")
    np.savez(part, **arrays)
    part.replace(path)


def kept(path: Path) -> tuple[list[Taken], dict[str, Answer]]:
    """Read them back."""
    with np.load(path, allow_pickle=False) as file:
        arrays: dict[str, dict[str, dict[str, Any]]] = {}
        for name in file.files:
            at, group, key = [*name.split("."), "", ""][:3]
            arrays.setdefault(at, {}).setdefault(group, {})[key] = file[name]
    sources = json.loads(str(arrays.pop("sources")[""][""]))
    samples, answers = [], {}
    for at, source in enumerate(sources):
        groups = arrays[str(at)]
        sample = TokenSample.make(source, groups["ids"][""], groups["mask"][""])
        samples.append(Taken(sample, groups.get("taken", {})))
        if "answer" in groups:
            answers[sample.key] = Answer(**groups["answer"], states=groups.get("said"))
    return samples, answers
