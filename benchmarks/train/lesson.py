"""Why states must be the right ones: one drafter on sound states, and others on states that are wrong in one way each.

    python -m benchmarks.train.lesson STORE TARGET PROMPTS OUT.json [LAYERS]

Every drafter has the same shape, seed, steps and samples; all are decoded against the same target, which gives the
true states then. Wrong states are planted in copies of the store whose manifests claim to be sound, which is how they
come in practice: training figures look fine for each. Stopped, it goes on where it was.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import msgspec
import torch
from benchmarks.train import variants

from hsdump.draft.begin import Sources
from hsdump.draft.chain import Decoding, Walk
from hsdump.draft.checkpoints import load_drafter
from hsdump.draft.eval import decode, load_target, read_prompts, summed, untrained
from hsdump.draft.options import TrainOptions
from hsdump.draft.target import Target
from hsdump.draft.train import train
from hsdump.draft.vocab import DraftVocab, default_vocab

OPTIONS = TrainOptions(
    ttt_steps=3,
    optimizer="muon",
    tokens=2048,
    epochs=12,
    max_steps=140,
    lr=8e-3,
    warmup=20,
    clip=1.0,
    held_out=0.04,
    validate_every=140,
    save_every=20,
)
"""Near the demo's, and half of its steps: enough for a sound drafter to be far from an untrained one."""


def main() -> None:
    store, target, prompts, out = (Path(word) for word in sys.argv[1:5])
    layers = [int(word) for word in sys.argv[5].split(",")] if len(sys.argv) > 5 else None
    options = msgspec.structs.replace(OPTIONS, layers=layers)
    work = out.with_suffix(".work")
    work.mkdir(parents=True, exist_ok=True)
    walks = read_prompts(prompts, str(target), None)
    how, rows = Decoding(new_tokens=64), json.loads(out.read_text()) if out.exists() else []
    runner = None
    for kind in ("sound", "layers-shifted", "pre-norm-final", "rows-shifted", "another-mapping", "untrained"):
        if any(row["states"] == kind for row in rows):
            continue
        if kind in {"sound", "layers-shifted", "pre-norm-final", "rows-shifted"}:
            path = store
            if kind != "sound":
                path = work / kind
                if not default_vocab(path).exists():
                    shutil.rmtree(path, ignore_errors=True)
                    variants.make(store, target, {kind: path})
                    shutil.copy(default_vocab(store), default_vocab(path))
            drafted = work / f"drafter-{kind}"
            found = train(Sources(store=path, out=drafted, model=str(target), unproved=True), options, quiet=True)
            drafter, _ = load_drafter(drafted, model=target)
            validation = found.acceptance_length
        else:
            drafter, _ = load_drafter(work / "drafter-sound", model=target)
            validation = None
            if kind == "another-mapping":  # what a d2t that is made again does to a head that was trained before
                ids = drafter.vocab.target_ids
                other = DraftVocab.of(range(len(ids)), drafter.vocab.target_size)
                drafter.d2t.copy_(torch.from_numpy(other.d2t))
            else:
                drafter = untrained(drafter, Target(target))
        runner = runner or load_target(drafter, str(target))
        again = [Walk(prompt=one.prompt, plain=one.plain) for one in walks]
        decode(drafter, runner, again, how)
        walks = again
        row = {"states": kind, "validation_length": validation, **msgspec.to_builtins(summed(again, kind))}
        rows.append(row)
        print(json.dumps(row), flush=True)
        out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
