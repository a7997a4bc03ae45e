"""The client's own process goes without torch, where torch is installed, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hsdump import lean
from hsdump.cli.main import VERBS
from hsdump.errors import InputError
from tests.draft.making import make_store, make_target
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


def without_torch(*words: str) -> tuple[int, str]:
    """Run a command where torch cannot be imported; give its exit code and what it said."""
    program = 'import sys\nsys.modules["torch"] = None\nfrom hsdump.cli.main import run\nrun()'
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_help_of_everything_is_to_be_had_without_torch() -> None:
    code, said = without_torch("--help")
    assert (code, "Traceback" in said) == (0, False), said
    assert {verb for verb in VERBS if verb not in said} == set()


@pytest.mark.parametrize("words", [["eval", "d", "--store", "s"], ["export", "d", "--to", "sglang", "--out", "o"]])
def test_a_command_that_needs_torch_says_so(words: list[str]) -> None:
    code, said = without_torch(*words)
    assert code == 64
    assert "needs torch" in said
    assert 'fix: install it: pip install "hsdump[train]"' in said
    assert "Traceback" not in said


def test_a_vocabulary_is_chosen_without_torch(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", make_target(tmp_path / "target"))
    model = model_for(tmp_path / "model", CHATML)
    code, said = without_torch("vocab", str(store), "--size", "40", "--model", str(model))
    assert code == 0, said


def test_an_environment_that_cannot_render_is_one_error_and_no_row_at_fault(tmp_path: Path) -> None:
    model = model_for(tmp_path / "model", CHATML)
    row = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    (tmp_path / "rows.jsonl").write_text(3 * row)
    program = 'import sys\nsys.modules["jinja2"] = None\nfrom hsdump.cli.main import run\nrun()'
    words = ["prepare", str(tmp_path / "rows.jsonl"), "--model", str(model), "--out", str(tmp_path / "out.parquet")]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode in (64, 65)
    assert "jinja2" in done.stderr
    assert "template-rejected" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
