"""`hsdump export --server`: an engine has to have accepted something of what it drafted."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import msgspec
import pytest

from hsdump.cli.main import main
from hsdump.demo.run import TARGET
from hsdump.draft.accept import Accepted, with_folder
from hsdump.draft.bench import Speed
from hsdump.draft.train import train
from hsdump.errors import ServerError, UsageError
from tests.draft.making import SMALL, sources_in
from tests.draft.test_sweep import SERVER, free_port


def speed(**changes: float) -> Speed:
    facts = {"failed": 0, "drafts": 9, "acceptance_length": 1.5, **changes}
    return Speed(concurrency=1, requests=4, tokens=40, seconds=1.0, tokens_per_s=40.0, **facts)  # type: ignore[arg-type]


def test_what_counts_as_accepted() -> None:
    def problem(**changes: float) -> str | None:
        return Accepted(server="http://a", engine="vllm", found=speed(**changes)).problem

    assert problem() is None
    assert problem(failed=1) == "1 of 4 requests failed"
    assert problem(drafts=0) == "http://a counted no draft: it serves without a drafter, or does not count"
    assert problem(acceptance_length=1.0) == "none of the tokens of 9 drafts was accepted"


def test_a_command_needs_a_place_for_the_folder() -> None:
    assert with_folder('serve --draft {draft} --json {"a": 1}', "/a b") == "serve --draft '/a b' --json {\"a\": 1}"
    with pytest.raises(UsageError, match=r"--launch has no place for the drafter: serve\n  fix: write \{draft\}"):
        with_folder("serve", "/a")


def test_export_starts_the_engine_and_asks_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "questions.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "def f():"}]}))
    train(sources_in(tmp_path), msgspec.structs.replace(SMALL, max_steps=1), quiet=True)
    for path in TARGET.glob("*token*"):
        shutil.copy(path, tmp_path / "target")
    shutil.copy(TARGET / "chat_template.jinja", tmp_path / "target")
    port = free_port()
    words = ["export", str(tmp_path / "drafter"), "--to", "sglang", "--json"]
    engine = ["--server", f"http://127.0.0.1:{port}", "--prompts", str(tmp_path / "questions.jsonl")]
    start = f"{sys.executable} {tmp_path / 'server.py'} {port} %d 1 4 {{draft}}"
    outcomes = {3: (0, None), 12: (0, None), 1: (1, "none of the tokens"), 0: (1, "counted no draft")}
    for steps, (code, problem) in outcomes.items():
        out = tmp_path / f"out-{steps}"
        assert main([*words, "--out", str(out), *engine, "--launch", start % steps]) == code
        found = json.loads(capsys.readouterr().out)["engine_check"]
        assert (problem or "") in (found["problem"] or "")
        assert found["found"]["acceptance_length"] == (steps or None)
        assert (out / "config.json").exists(), "what was exported stays, whatever the engine said"
    broken = [*engine, "--launch", "sh -c 'echo KeyError: no such weight; echo bye; exit 3' {draft}"]
    assert main([*words, "--out", str(tmp_path / "broken"), *broken]) == ServerError.exit_code
    assert re.search(r"ended with code 3 before it answered: KeyError: no such weight\n", capsys.readouterr().err)
    assert main([*words, "--out", str(tmp_path / "none"), "--launch", start % 1]) == UsageError.exit_code
    assert "belong together" in capsys.readouterr().err
    assert not (tmp_path / "none").exists(), "options are looked at before anything is written"
