"""Why states must be the right ones: one drafter on sound states, and others on states that are wrong in one way each.

    python -m benchmarks.train.lesson STORE TARGET PROMPTS OUT.json

Every drafter has the same shape, seed, steps and samples; all are decoded against the same target, which gives the
true states then. Wrong states are planted in copies of the store whose manifests claim to be sound, which is how they
come in practice: training figures look fine for each.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch

from hsdump.arrays import StateArray, to_float32
from hsdump.draft.begin import Sources, default_vocab
from hsdump.draft.chain import Decoding, Walk
from hsdump.draft.checkpoints import load_drafter
from hsdump.draft.eval import decode, load_target, read_prompts, summed, untrained
from hsdump.draft.options import TrainOptions
from hsdump.draft.target import Target
from hsdump.draft.train import train
from hsdump.draft.vocab import DraftVocab
from hsdump.samples import TokenSample
from hsdump.store import Store, StoreWriter
from hsdump.store.fp8 import from_float32

OPTIONS = TrainOptions(
    ttt_steps=3, tokens=512, epochs=12, max_steps=160, lr=4e-3, warmup=20, clip=1.0, held_out=0.08, validate_every=160
)


def wrong_copy(store: Path, target: Path, folder: Path, kind: str) -> Path:
    """Copy a store with states that are wrong in one way."""
    import transformers

    path = folder / kind
    model = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
    last: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _module, inputs: last.append(inputs[0].detach()))
    with Store(store) as opened, StoreWriter.open(path, opened.manifest) as writer:
        shape = opened.manifest.shape
        for sample in opened:
            with torch.inference_mode():
                last.clear()
                hidden = model.model(torch.from_numpy(sample.input_ids.copy())[None], output_hidden_states=True)
            states = [np.array(state) for state in sample.states.values()]
            if kind == "layers-shifted":
                shifted = [hidden.hidden_states[layer + 1][0] for layer in shape.layers]
                states = [*map(_bits, shifted), states[-1]]
            elif kind == "pre-norm-final":
                states[-1] = _bits(last[0][0])
            elif kind == "rows-shifted":
                states = [np.roll(state, 1, axis=0) for state in states]
            made = TokenSample.make(sample.source, sample.input_ids.copy(), sample.loss_mask.copy())
            writer.add(made, tuple(states))
        writer.commit()
    shutil.copy(default_vocab(store), default_vocab(path))
    return path


def _bits(state: torch.Tensor) -> StateArray:
    return from_float32(
        to_float32(state.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16), "bfloat16"), "bfloat16"
    )


def main() -> None:
    store, target, prompts, out = (Path(word) for word in sys.argv[1:5])
    work = out.with_suffix(".work")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    walks = read_prompts(prompts, str(target), None)
    how, rows = Decoding(new_tokens=64), []
    runner = None
    for kind in ("sound", "layers-shifted", "pre-norm-final", "rows-shifted", "another-mapping", "untrained"):
        if kind in {"sound", "layers-shifted", "pre-norm-final", "rows-shifted"}:
            path = store if kind == "sound" else wrong_copy(store, target, work, kind)
            drafted = work / f"drafter-{kind}"
            found = train(Sources(store=path, out=drafted, model=str(target), unproved=True), OPTIONS, quiet=True)
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
