"""What `hsdump extract` refuses before anything long is done, and what `status` says of a run that ended unseen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hsdump.cli import extract
from hsdump.cli.main import main
from hsdump.cli.status import show_status
from hsdump.extract.heartbeat import StoreStatus
from tests.unit.test_display import drawn

NOBODY = "http://127.0.0.1:1"


def rows(folder: Path) -> str:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n")
    return str(path)


def test_nothing_is_generated_before_a_server_was_seen_to_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(*_what: Any, **_more: Any) -> None:
        raise AssertionError("the server was asked for answers")

    monkeypatch.setattr(extract, "answer_first", answer)
    words = ["extract", rows(tmp_path), "--server", NOBODY, "--generate", "--out", str(tmp_path / "store")]
    assert main(words) == 69
    assert "nothing answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--server", NOBODY, "--phase", "decode", "--generate"], "leave --generate out"),
        (["--server", "127.0.0.1:30000"], "fix: --server http://127.0.0.1:30000"),
    ],
)
def test_what_cannot_work_is_a_users_mistake(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["extract", rows(tmp_path), "--out", str(tmp_path / "store"), *words]) == 64
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("running", "stopped", "captured", "says_so"),
    [(False, None, 3, True), (False, None, 0, False), (False, "interrupted", 3, False), (True, None, 3, False)],
)
def test_status_says_that_a_run_ended_without_a_last_word(
    running: bool, stopped: str | None, captured: int, says_so: bool
) -> None:
    found = StoreStatus(
        store="store",
        running=running,
        committed=5,
        tokens=500,
        states={"pending": 0, "sent": 0, "captured": captured, "committed": 5, "failed": 0},
        failed={},
        skipped={},
        run={"pid": 1, "updated": "now", "stopped": stopped, "seconds": 10.0, "captured_tokens": 4000, "tokens": 500},
    )
    said = drawn(show_status(found))
    assert ("run the same command again" in said) is says_so
    assert "400 tokens/s" in said
