"""The client's own process goes without torch, where torch is installed, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hsdump import lean
from hsdump.errors import InputError
from tests.prompts.cases import CHATML
from tests.prompts.real import model_for

PLAN = """
import sys
sys.argv = ["hsdump", "plan", *sys.argv[1:]]
from hsdump.cli.main import run
try:
    run()
except SystemExit as end:
    print("ended with", end.code, "torch" in sys.modules, "transformers" in sys.modules)
import torch
print("torch", torch.zeros(2).tolist())
"""


def test_a_command_that_only_tokenizes_imports_no_torch_and_nothing_says_that_it_is_missing(tmp_path: Path) -> None:
    model = model_for(tmp_path / "model", CHATML)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    config = '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8, "hidden_size": 64}'
    (model / "config.json").write_text(config)
    words = [str(tmp_path / "rows.jsonl"), "--model", str(model)]
    done = subprocess.run([sys.executable, "-c", PLAN, *words], capture_output=True, text=True, check=True)
    *_, ended, torch = done.stdout.splitlines()
    assert (ended, torch) == ("ended with 0 False True", "torch [0.0, 0.0]")
    assert "PyTorch" not in done.stderr


def test_what_needs_torch_is_done_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lean.apart(os.getpid) == os.getpid()
    monkeypatch.setattr(lean._Process, "lean", True)
    assert lean.apart(os.getpid) != os.getpid()
    with pytest.raises(InputError, match="the process that computes layers of the model died"):
        lean.apart(os._exit, 1)
