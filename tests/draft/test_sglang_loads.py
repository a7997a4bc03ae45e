"""Our export in the real SGLang's own model class: every weight arrives, the mapping too, and the logits are ours."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from hsdump.draft.begin import build
from hsdump.draft.checkpoints import load_drafter
from hsdump.draft.export import export_drafter
from hsdump.draft.foreign import read_drafter
from hsdump.draft.model import Inputs
from hsdump.draft.train import train
from hsdump.draft.unrolled import make_causal
from tests.draft.making import HIDDEN, LAYERS, SMALL, VOCAB, sources_in
from tests.server.harness import SGLANG_PYTHON

TOKENS = 9

RELATIVE = 1e-5
"""Of logits, in float32 on both sides: SGLang's one matrix for q, k and v sums in another order than our three."""


@pytest.mark.skipif(not SGLANG_PYTHON.exists(), reason="no SGLang here: make engines")
def test_sglangs_own_class_takes_our_export(tmp_path: Path) -> None:
    sources = sources_in(tmp_path)
    train(sources, msgspec.structs.replace(SMALL, max_steps=2), quiet=True)
    out = tmp_path / "exported"
    export_drafter(tmp_path / "drafter", out, "sglang")
    _, target, facts = build(sources, SMALL)
    plain = msgspec.to_builtins(facts["config"])
    names = ("vocab_size", "draft_vocab_size", "layers", "num_target_layers", "target_class", "target_path")
    known = {name: plain[name] for name in names}
    vocab = load_drafter(tmp_path / "drafter")[0].vocab
    # Read back from the export, so that the weights are rounded as SGLang reads them.
    _, drafter = read_drafter(out, target, vocab, {**known, "target_digest": "", "store_engine": ""})

    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCAB, (TOKENS,), generator=generator)
    aux = torch.randn(TOKENS, HIDDEN * len(LAYERS), generator=generator)
    asked = {"input_ids": ids, "aux": aux, "embeddings": torch.from_numpy(target.embeddings())}
    save_file(asked, tmp_path / "asked.safetensors")
    script, answer = Path(__file__).with_name("sglang_drafter.py"), tmp_path / "answer.safetensors"
    command = [str(SGLANG_PYTHON), str(script), str(out), str(tmp_path / "asked.safetensors"), str(answer)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SGLANG_DISABLED_MODEL_ARCHS": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["class"] == "LlamaForCausalLMEagle3"
    assert found["empty"] == [], "SGLang's class has weights that the export does not fill"
    assert found["ignored"] == [], "the export has weights that SGLang's class does not take"

    theirs = load_file(answer)
    assert theirs["hot"].tolist() == vocab.target_ids.tolist()
    inputs = Inputs(
        input_ids=ids,
        aux=aux,
        position_ids=torch.arange(TOKENS),
        document_ids=torch.zeros(TOKENS, dtype=torch.int64),
        lengths=torch.tensor([TOKENS]),
    )
    with torch.inference_mode():
        ours = drafter.lm_head(next(drafter.unroll(inputs, 1, make_causal(inputs, "dense"))))
    torch.testing.assert_close(theirs["logits"], ours, rtol=RELATIVE, atol=RELATIVE * float(ours.abs().max()))
