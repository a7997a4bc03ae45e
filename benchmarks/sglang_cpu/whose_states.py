"""Whose states? A real pre-trained Gemma 3 in two SGLangs: one whose own auxiliary capture is faulty, and one mended.

    python -m benchmarks.story.pretrained gemma-3-270m-q4_k_m.gguf MODEL
    python -m benchmarks.sglang_cpu.whose_states --target MODEL --answers answers.parquet --prompts test.jsonl \
        --work WORK --out result.json

SGLang 0.5.23 keeps the sum of Gemma 3's layers apart from what each adds, and hands only the latter to drafters
(sgl-project/sglang#39286). A drafter learns from the states of each SGLang, and decodes in both. The mended one is a
copy with the sum added where states are taken. bfloat16 when states are taken, float32 when drafts are counted, so
that one token and four round alike. Servers are those of the tests; speed says nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.sglang_cpu.serve import PRECISION, counted, said, same
from benchmarks.story.bench import answers
from benchmarks.story.scale import SCALES
from tests.server.harness import SGLANG_PYTHON, SglangServer
from tests.server.test_speculation import drafts

from hsdump.draft.eval import read_prompts

TAKEN = "aux_hidden_states.append(hidden_states)"
WITH_THE_SUM = "aux_hidden_states.append(hidden_states if residual is None else hidden_states + residual)"
KINDS = ("stock", "mended")
LAYERS = "2,9,15"
SCALE = SCALES["pretrained-cpu"]


def mended(work: Path) -> Path:
    """Copy SGLang and add the sum where Gemma 3's states are taken."""
    tree = work / "mended-sglang"
    if not tree.exists():
        installed = next(SGLANG_PYTHON.parents[1].glob("lib/python*/site-packages/sglang"))
        part = tree.with_name(f"{tree.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(installed, part / "sglang")
        model = part / "sglang/srt/models/gemma3_causal.py"
        source = model.read_text(encoding="utf-8")
        assert source.count(TAKEN) == 3, "another SGLang than the one that this was written for"
        model.write_text(source.replace(TAKEN, WITH_THE_SUM), encoding="utf-8")
        part.rename(tree)
    return tree


def hsdump(*words: object, codes: Sequence[int] = (0,)) -> dict[str, Any]:
    """Run one command as a user does; its report."""
    command = [sys.executable, "-m", "hsdump.cli.main", *map(str, words), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    assert done.returncode in codes, (words, done.returncode, done.stdout)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def learned(kind: str, tree: Path | None, options: argparse.Namespace) -> dict[str, Any]:
    """Take one SGLang's states, judge them, and have a drafter learn from them."""
    place: Path = options.work / kind
    place.mkdir(parents=True, exist_ok=True)
    store, drafter, model = place / "store", place / "drafter", ("--model", options.target)
    options_of_serve = ("--layers", LAYERS)
    with SglangServer(model=options.target, log=place / "log", serve_options=options_of_serve, tree=tree) as server:
        at = ("--server", server.url)
        probe = hsdump("probe", *at, *model, "--fresh", codes=(0, 1, 2))
        hsdump("extract", options.answers, *at, *model, "--out", store, "--no-probe")
        proof = hsdump("prove", store, *at, *model, "--samples", SCALE.prove_samples, codes=(0, 1))
    vocabulary = hsdump("vocab", store, *model, "--size", SCALE.draft_vocab)
    words = ("train", store, *model, "--out", drafter, *SCALE.train, *SCALE.heads, "--device", "cpu")
    trained = hsdump(*words, *([] if proof["exit_code"] == 0 else ["--unproved"]))
    exported = place / "exported"
    shutil.rmtree(exported, ignore_errors=True)
    hsdump("export", drafter, "--to", "sglang", "--out", exported)
    return {
        "probe": {"verdict": probe["verdict"], "words": probe["words"], "states": probe["states"]},
        "prove": {"verdict": proof["verdict"], "words": proof["words"]},
        "vocabulary": {name: vocabulary.get(name) for name in ("coverage_train", "coverage_held_out")},
        "trained": {name: value for name, value in trained.items() if name not in ("out", "target")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang_cpu.whose_states")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True, help="samples, as `hsdump generate` writes them")
    parser.add_argument("--prompts", type=Path, required=True, help="questions that the drafters have not seen")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--new-tokens", type=int, default=SCALE.bench_new_tokens)
    options = parser.parse_args()
    options.target, options.work = options.target.resolve(), options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    trees = {"stock": None, "mended": mended(options.work)}
    result: dict[str, Any] = {
        "engine": "SGLang 0.5.23, as installed and mended; greedy, 3 steps, AMX kernels in plain torch",
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "new_tokens": options.new_tokens,
        "states": {kind: learned(kind, trees[kind], options) for kind in KINDS},
        "decoded": {},
    }
    prompts = [one.prompt for one in read_prompts(options.prompts, str(options.target), None)]
    result["prompts"] = len(prompts)
    with SglangServer(model=options.target, log=options.work / "plain", capture=False, sglang_args=PRECISION) as server:
        plain = said(asyncio.run(answers(server.url, prompts, options.new_tokens, 4)))
    for kind in KINDS:
        for states in KINDS:
            name = f"{kind} SGLang, drafter from {states} states"
            args = (*PRECISION, *drafts(options.work / states / "exported", 3, 1, 4))
            log = options.work / f"{kind}-{states}"
            with SglangServer(
                model=options.target, log=log, capture=False, sglang_args=args, tree=trees[kind]
            ) as server:
                replies = asyncio.run(answers(server.url, prompts, options.new_tokens, 4))
            result["decoded"][name] = {**counted(replies), "identical_outputs": same(said(replies), plain)}
            print(name, json.dumps(result["decoded"][name]), flush=True)
            options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
