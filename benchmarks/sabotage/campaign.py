"""The sabotage campaign: everything that has gone wrong silently is planted on purpose, and each detector must speak.

    python -m benchmarks.sabotage.campaign --samples 500 --out benchmarks/results/sabotage

starts the real SGLang on the CPU with the tiny Llama (see tests/server/harness.py), captures twice, plants, and writes
`sabotage.json` and `sabotage.md`. With `--work FOLDER` captures and what was judged so far are kept, and the same
command goes on where it ended. The test suite runs a campaign with fewer samples.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from benchmarks.sabotage.captures import PLANTED, TOKEN_SABOTAGES, capture_all, kept, taken
from benchmarks.sabotage.sabotages import (
    LAYERS,
    NAMES,
    OF_STATES,
    Sabotage,
    Taken,
    World,
)

from hsdump._version import __version__
from hsdump.arrays import to_float32
from hsdump.demo.tiny_model import make_tiny_model
from hsdump.extract.identity import manifest_of
from hsdump.prompts import PromptOptions, Renderer
from hsdump.samples import TokenSample
from hsdump.schema import EngineInfo, StateShape
from hsdump.store import Manifest, Store, StoreWriter
from hsdump.verify import verify_store
from hsdump.verify.compare import compare_stores
from hsdump.verify.probe import Captured, Prober
from hsdump.verify.prove import Prover
from hsdump.verify.witness import Answer

DETECTORS = ("verify", "prove", "compare", "probe")
AMONG_ALL = ("1 % of samples from another model", "bf16 rounded to fp16 and back")
"""Faults that are planted in the whole store: a share of it, and one that only shows in many values."""


@dataclass(kw_only=True)
class Bench:
    """What all sabotages share: clean captures, and the server's answers."""

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


def prepare(url: str, model: Path, folder: Path, count: int) -> Bench:
    """Capture clean samples twice, with other company in the batches, and make everything ready."""
    capture_all(url, model, folder, count)
    return set_up(model, folder)


def set_up(model: Path, folder: Path) -> Bench:
    """Make detectors and saboteurs ready for what was captured."""
    info = msgspec.json.decode((folder / "info.json").read_bytes(), type=EngineInfo)
    renderer = Renderer.load(str(model), PromptOptions())
    manifest = manifest_of(
        replace(info, model_path=str(model)),
        replace(info.shape, layers=tuple(LAYERS), final_state="post_norm"),
        tokenizer_digest=renderer.tokenizer_digest,
        template_digest=renderer.template_digest,
        max_tokens=info.context_length,
    )
    clean, answers = kept(folder / "clean.npz")
    sequences, probe_answers = kept(folder / "probe.npz")
    tokens = {}
    for number, name in enumerate(TOKEN_SABOTAGES):
        wrong, said = kept(folder / f"tokens{number}.npz")
        tokens[name] = ([one.sample for one in wrong], said)
    other = folder / "other-model"
    if not (other / "config.json").exists():
        make_tiny_model(other, "llama", seed=1)
    twin = taken([one.sample for one in clean], answers)
    return Bench(
        model=model,
        info=info,
        manifest=manifest,
        clean=clean,
        answers=answers,
        twin=write_store(folder / "twin", manifest, twin),
        probe_taken=taken([one.sample for one in sequences], probe_answers),
        probe_answers=probe_answers,
        world=World(model, other),
        prover=Prover(manifest, str(model)),
        folder=folder,
        tokens=tokens,
    )


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


def campaign(bench: Bench) -> dict[str, Any]:
    """Let all detectors look at everything that is not judged yet; the server is not needed any more."""
    count, all_of_it = len(bench.clean), bench.clean
    parts: dict[str, Callable[[], dict[str, Any]]] = {"clean": lambda: detect(bench, all_of_it, bench.probe_taken)}
    parts |= {name: partial(judge_tokens, bench, name) for name in TOKEN_SABOTAGES}
    for name, plant in OF_STATES.items():
        probed = None if name == AMONG_ALL[0] else bench.probe_taken
        samples = all_of_it if name in AMONG_ALL else all_of_it[:PLANTED]
        parts[name] = partial(_sabotaged, bench, plant, samples, probed)
    table = {name: _once(bench.folder / "judged", name, judge) for name, judge in parts.items()}
    clean = table.pop("clean")
    return {
        "command": f"python -m benchmarks.sabotage.campaign --samples {count}",
        "hsdump": __version__,
        "engine": f"sglang {bench.info.engine_version}, {bench.info.model_class}, {bench.info.device}",
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "samples": count,
        "planted_among": min(count, PLANTED),
        "tokens": int(sum(len(one.sample.input_ids) for one in all_of_it)),
        "clean": clean,
        "sabotages": table,
        "missed": [name for name, found in table.items() if not _by(found)],
        "false_alarms": len(_by(clean)),
        "clean_samples_named": int(sum(clean[one].get("samples", 0) for one in DETECTORS)),
        "seconds": round(sum(found["seconds"] for found in (clean, *table.values())), 1),
    }


def _sabotaged(
    bench: Bench, plant: Sabotage, samples: list[Taken], probed: list[Taken] | None
) -> dict[str, dict[str, Any]]:
    return detect(bench, plant(bench.world, samples), None if probed is None else plant(bench.world, probed))


def _once(folder: Path, name: str, judge: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Judge, or read what was judged before this campaign was ended."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    if not path.exists():
        started = time.monotonic()
        found = judge()
        found["seconds"] = round(time.monotonic() - started, 1)
        path.write_text(json.dumps(found))
        print(f"{name}: {_by(found) or 'silent'} ({found['seconds']} s)", flush=True)
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def _by(found: Mapping[str, Any]) -> list[str]:
    """Name the detectors that spoke."""
    return [name for name in DETECTORS if found.get(name, {}).get("caught")]


def as_table(result: Mapping[str, Any]) -> str:
    """Write the result as Markdown."""
    what = f"{result['engine']}; {result['samples']} clean samples, {result['tokens']} tokens; faults planted among "
    what += f"{result['planted_among']} of them ({' and '.join(AMONG_ALL)}: among all); "
    what += f"hsdump {result['hsdump']}; {result['seconds']} s on {result['machine']}. "
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
    parser.add_argument("--work", type=Path, help="keep captures and what was judged so far here, and go on with them")
    options = parser.parse_args()
    model = tiny_model_path("llama")
    with tempfile.TemporaryDirectory() as name:
        folder = options.work or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "info.json").exists():  # the last thing that is kept of a capture
            if options.server:
                capture_all(options.server, model, folder, options.samples)
            else:
                with SglangServer(model=model, log=folder / "server.log", serve_options=("--layers", "all")) as server:
                    capture_all(server.url, model, folder, options.samples)
            print("captured", flush=True)
        result = campaign(set_up(model, folder))
    assert result["samples"] == options.samples, f"{folder} holds a campaign of {result['samples']} samples"
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(as_table(result))
    print(as_table(result))


if __name__ == "__main__":
    main()
