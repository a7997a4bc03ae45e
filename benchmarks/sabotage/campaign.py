"""The sabotage campaign: everything that has gone wrong silently is planted on purpose, and each detector must speak.

    python -m benchmarks.sabotage.campaign --samples 500 --out benchmarks/results/sabotage

starts the real SGLang on the CPU with the tiny Llama (see tests/server/harness.py), captures twice, plants, and writes
`sabotage.json` and `sabotage.md`. The test suite runs it with fewer samples.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.sabotage.sabotages import LAYERS, NAMES, OF_STATES, Taken, World, other_template, shifted_tokenizer

from hsdump._version import __version__
from hsdump.arrays import to_float32
from hsdump.demo.tiny_model import make_tiny_model
from hsdump.engines.base import CaptureRequest
from hsdump.engines.sglang_http import SglangEngine
from hsdump.extract.identity import model_digest
from hsdump.extract.plan import LAYER_MEANING
from hsdump.prompts import PromptOptions, Renderer, read_samples
from hsdump.samples import TokenSample
from hsdump.schema import EngineInfo, StateShape
from hsdump.store import Manifest, Store, StoreWriter
from hsdump.verify import verify_store
from hsdump.verify.compare import compare_stores
from hsdump.verify.probe import Captured, Prober, probe_sequences
from hsdump.verify.prove import Prover
from hsdump.verify.witness import Answer, Witness

DETECTORS = ("verify", "prove", "compare", "probe")
SHORT = 200
"""Characters of a turn, so that many samples fit into a campaign."""

PLANTED = 60
"""Samples among which a fault is planted; the clean ones are all looked at."""

TOKEN_SABOTAGES = ("another chat template", "another tokenizer revision")


@dataclass(kw_only=True)
class Bench:
    """What all sabotages share: clean captures, and the server's answers."""

    url: str
    model: Path
    info: EngineInfo
    manifest: Manifest
    clean: list[Taken]
    answers: dict[str, Answer]
    twin: Path
    """A store of a second capture of the same tokens."""

    probe_taken: list[Taken]
    probe_answers: dict[str, Answer]
    tokens: dict[str, tuple[list[TokenSample], dict[str, Answer]]]
    """Samples of wrong tokens, by sabotage, and what the server says of those."""

    world: World
    prover: Prover
    folder: Path


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


def prepare(url: str, model: Path, folder: Path, count: int) -> Bench:
    """Capture clean samples twice, with other company in the batches."""
    samples = text_samples(model, conversations(count + count // 4 + 10), folder)[:count]
    info, first = ask(url, samples)
    second = capture_again(url, samples[::-1])
    renderer = Renderer.load(str(model), PromptOptions())
    manifest = Manifest(
        engine="sglang",
        engine_version=info.engine_version,
        model_path=str(model),
        model_digest=model_digest(str(model)),
        model_class=info.model_class,
        num_layers=info.num_layers,
        vocab_size=info.vocab_size,
        layers=list(LAYERS),
        hidden_size=info.shape.hidden_size,
        dtype=info.shape.dtype,
        final_state="post_norm",
        layer_meaning=LAYER_MEANING,
        tokenizer_digest=renderer.tokenizer_digest,
        template_digest=renderer.template_digest,
        max_tokens=info.context_length,
    )
    sequences = [
        TokenSample.make("probe", ids, np.ones(len(ids), np.uint8)) for _, ids in probe_sequences(info.vocab_size)
    ]
    _, probe_answers = ask(url, sequences)
    other = make_tiny_model(folder / "other-model", "llama", seed=1)
    bench = Bench(
        url=url,
        model=model,
        info=info,
        manifest=manifest,
        clean=second[::-1],
        answers=first,
        twin=folder / "twin",
        probe_taken=taken(sequences, probe_answers),
        probe_answers=probe_answers,
        world=World(model, other),
        prover=Prover(manifest, str(model)),
        folder=folder,
        tokens={name: ask_tokens(url, model, name, samples[:PLANTED]) for name in TOKEN_SABOTAGES},
    )
    write_store(bench.twin, manifest, taken(samples, first))
    return bench


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


def write_store(path: Path, manifest: Manifest, samples: Sequence[Taken]) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    with StoreWriter.open(path, manifest) as writer:
        for one in samples:
            writer.add(one.sample, [one.states[name] for name in NAMES])
        writer.commit()
    return path


def detect(bench: Bench, samples: Sequence[Taken], probed: Sequence[Taken] | None) -> dict[str, dict[str, Any]]:
    """Let every detector look."""
    path = write_store(bench.folder / "planted", bench.manifest, samples)
    found: dict[str, dict[str, Any]] = {}
    report = verify_store(path)
    found["verify"] = {
        "caught": report.exit_code != 0,
        "samples": len({finding.sample for finding in report.findings if finding.sample}),
        "words": sorted(report.counts),
    }
    with Store(path) as store:
        answers = {one.sample.key: bench.answers[one.sample.key] for one in samples}
        proof = bench.prover.judge(store.__getitem__, answers)
    off = {diff.sample for diff in proof.off_samples} | set(proof.logits.off_samples if proof.logits else [])
    found["prove"] = {"caught": proof.verdict == "not proved", "samples": len(off), "words": proof.words}
    compared = compare_stores(path, bench.twin)
    found["compare"] = {"caught": compared.exit_code != 0, "samples": compared.off_count, "words": compared.words}
    if probed is not None:
        found["probe"] = _probe(bench, probed)
    return found


def _probe(bench: Bench, probed: Sequence[Taken]) -> dict[str, Any]:
    """The same fault in the tap, as a probe at the start of an extraction would meet it."""
    shape = StateShape(
        layers=LAYERS, hidden_size=bench.info.shape.hidden_size, dtype=bench.info.shape.dtype, final_state="post_norm"
    )
    facts = {name: getattr(bench.info, name) for name in EngineInfo.__dataclass_fields__}
    own = tuple(layer - 1 for layer in LAYERS)
    info = EngineInfo(**{**facts, "shape": shape, "engine_layers": own})
    answers = {}
    for one in probed:
        before = bench.probe_answers[one.sample.key]
        states = {name: one.states[name] for name in NAMES}
        fields = {name: getattr(before, name) for name in Answer.__dataclass_fields__}
        answers[one.sample.key] = Answer(**{**fields, "states": states})
    captured = Captured(
        ids=np.stack([one.sample.input_ids for one in probed]),
        states={name: np.stack([to_float32(one.states[name], shape.dtype) for one in probed]) for name in NAMES},
        answers=answers,
    )
    report = Prober(info, str(bench.model)).judge(captured)
    return {"caught": report.verdict != "agrees", "verdict": report.verdict, "words": report.words}


def judge_tokens(bench: Bench, name: str) -> dict[str, dict[str, Any]]:
    """Only the tokens can show it."""
    samples, answers = bench.tokens[name]
    path = write_store(bench.folder / "planted", bench.manifest, taken(samples, answers))
    report = verify_store(path)
    with Store(path) as store:
        proof = bench.prover.judge(store.__getitem__, answers)
    compared = compare_stores(path, bench.twin)
    return {
        "verify": {"caught": report.exit_code != 0, "samples": 0, "words": sorted(report.counts)},
        "prove": {"caught": proof.verdict == "not proved", "samples": len(samples), "words": proof.words},
        "compare": {"caught": compared.exit_code != 0, "samples": 0, "words": compared.words},
    }


def _by_other_template(renderer: Renderer, talk: list[dict[str, str]]) -> TokenSample:
    ids: list[int] = []
    mask: list[int] = []
    for text, learned in other_template(talk):
        new, _ = renderer.tokens.encode(text, add_special_tokens=False)
        ids += new.tolist()
        mask += [int(learned)] * len(new)
    return TokenSample.make("other-template", np.array(ids, np.int64), np.array(mask, np.uint8))


def campaign(bench: Bench) -> dict[str, Any]:
    """Let all detectors look at everything; the server is not needed any more."""
    started = time.monotonic()
    count = len(bench.clean)
    table = {name: judge_tokens(bench, name) for name in TOKEN_SABOTAGES}
    clean = detect(bench, bench.clean, bench.probe_taken)
    for name, plant in OF_STATES.items():
        probed = None if name == "1 % of samples from another model" else plant(bench.world, bench.probe_taken)
        table[name] = detect(bench, plant(bench.world, bench.clean[:PLANTED]), probed)
        print(name, {detector: found["caught"] for detector, found in table[name].items()}, flush=True)
    return {
        "command": f"python -m benchmarks.sabotage.campaign --samples {count}",
        "hsdump": __version__,
        "engine": f"sglang {bench.info.engine_version}, {bench.info.model_class}, {bench.info.device}",
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "samples": len(bench.clean),
        "planted_among": min(count, PLANTED),
        "tokens": int(sum(len(one.sample.input_ids) for one in bench.clean)),
        "clean": clean,
        "sabotages": table,
        "missed": [name for name, found in table.items() if not any(one["caught"] for one in found.values())],
        "false_alarms": sum(bool(one["caught"]) for one in clean.values()),
        "clean_samples_named": int(sum(one.get("samples", 0) for one in clean.values())),
        "seconds": round(time.monotonic() - started, 1),
    }


def as_table(result: Mapping[str, Any]) -> str:
    """Write the result as Markdown."""
    what = f"{result['engine']}; {result['samples']} clean samples, {result['tokens']} tokens, faults planted among "
    what += f"{result['planted_among']}; hsdump {result['hsdump']}; {result['seconds']} s on {result['machine']}. "
    what += f"`{result['command']}`"
    lines = [
        "# Sabotage campaign",
        "",
        what,
        "",
        "| sabotage | " + " | ".join(DETECTORS) + " |",
        "|---|" + "---|" * len(DETECTORS),
    ]
    for name, found in {"(none: clean)": result["clean"], **result["sabotages"]}.items():
        marks = [("**caught**" if found[one]["caught"] else "silent") if one in found else "n/a" for one in DETECTORS]
        lines.append(f"| {name} | " + " | ".join(marks) + " |")
    alarms, named = result["false_alarms"], result["clean_samples_named"]
    lines += [
        "",
        f"Missed by all: {result['missed'] or 'none'}. False alarms on clean data: {alarms}, samples named {named}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    from tests.server.harness import SglangServer
    from tests.tiny_models import tiny_model_path

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--server", help="of a server that captures all layers of the tiny Llama; else one is started")
    options = parser.parse_args()
    model = tiny_model_path("llama")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.server:
            bench = prepare(options.server, model, folder, options.samples)
        else:
            with SglangServer(model=model, log=folder / "server.log", serve_options=("--layers", "all")) as server:
                bench = prepare(server.url, model, folder, options.samples)
        result = campaign(bench)
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(as_table(result))
    print(as_table(result))


if __name__ == "__main__":
    main()
