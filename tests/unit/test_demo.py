"""The demo's own parts: its prompts, the folder that it may clear, and the whole of it once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from hsdump._version import __version__
from hsdump.demo import run, tokenizer, train_target
from hsdump.demo.run import MARKER, PROMPTS, Demo, Places, main
from hsdump.errors import InputError, StoreError, UsageError
from hsdump.store import Store

SCRIPTS = {
    "Arabic": r"[\u0600-\u06ff]",
    "Cyrillic": r"[\u0400-\u04ff]",
    "Devanagari": r"[\u0900-\u097f]",
    "Hangul": r"[\uac00-\ud7af]",
    "Han": r"[\u4e00-\u9fff]",
    "Kana": r"[\u3040-\u30ff]",
    "Latin": r"[a-z]",
}


@pytest.fixture(scope="module")
def conversations() -> list[dict[str, Any]]:
    return [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


def test_prompts_are_whole_conversations(conversations: list[dict[str, Any]]) -> None:
    for row in conversations:
        messages = row["messages"]
        turns = messages[1:] if messages[0]["role"] == "system" else messages
        assert [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2), row["id"]
        assert all(turn["content"].strip() == turn["content"] != "" for turn in messages), row["id"]


def test_prompts_are_as_many_and_as_mixed_as_promised(conversations: list[dict[str, Any]]) -> None:
    texts = ["\n".join(message["content"] for message in row["messages"]) for row in conversations]
    assert len(conversations) >= 72
    assert len({row["id"] for row in conversations}) == len(conversations) == len(set(texts))
    assert sum(sum(m["role"] == "user" for m in row["messages"]) > 1 for row in conversations) >= 30
    assert sum("`" in text for text in texts) >= 15
    assert sum(row["messages"][0]["role"] == "system" for row in conversations) >= 5
    for script, pattern in SCRIPTS.items():
        assert any(re.search(pattern, text) for text in texts), script


def test_no_answer_is_said_twice(conversations: list[dict[str, Any]]) -> None:
    sentences = [
        sentence
        for row in conversations
        for message in row["messages"]
        if message["role"] == "assistant"
        for sentence in re.split(r"(?<=[.!?。])\s+", message["content"])
        if len(sentence) > 20
    ]
    twice = {sentence for sentence in sentences if sentences.count(sentence) > 1}
    # A toast that is asked for again in half the length keeps its last two sentences.
    assert all(sentence.startswith(("May ", "To ")) for sentence in twice), twice


def test_only_a_folder_of_the_demo_is_cleared(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "precious").write_text("924 GiB")
    with pytest.raises(UsageError, match="holds files that the demo did not write"):
        Places(tmp_path).start_afresh()
    assert main(["--out", str(tmp_path)]) == UsageError.exit_code
    assert (store / "precious").exists()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(UsageError, match="out is a file"):
        Places(tmp_path / "out").start_afresh()


def test_starting_afresh_leaves_files_of_others(tmp_path: Path) -> None:
    places = Places(tmp_path / "out")
    places.start_afresh()
    places.store.mkdir()
    places.summary.write_text("{}")
    (places.out / "notes.txt").write_text("mine")
    places.start_afresh()
    assert sorted(path.name for path in places.out.iterdir()) == [MARKER, "notes.txt"]


def test_the_whole_demo(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its steps with less of everything; what a drafter reaches is in docs/drafter.md."""
    monkeypatch.setattr(run, "LEARN", 32)
    monkeypatch.setattr(run, "TEST", 3)
    monkeypatch.setattr(run, "NEW_TOKENS", 32)
    small = ("--tokens", "512", "--ttt-steps", "2", "--max-steps", "12", "--warmup", "2", "--held-out", "0.2")
    monkeypatch.setattr(run, "TRAINING", small)
    out = tmp_path / "out"
    assert main(["--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["verdict"] == "clean"
    assert summary["lossless"] is True
    assert 1.0 <= summary["acceptance_length"] <= 4.0
    assert 1.0 <= summary["acceptance_length_untrained"] < 1.2
    assert summary["hsdump_version"] == __version__
    assert set(summary["seconds"]) == {"answers", "extract", "verify", "vocab", "train", "export", "eval", "total"}
    with Store(out / "store", check=True) as store:
        assert summary["samples"] == len(store) <= 32
        assert store.manifest.layers == summary["layers"]
        assert sum(sample.num_tokens for sample in store) == summary["tokens"]
        assert sum(int(sample.loss_mask.sum()) for sample in store) == summary["loss_tokens"]
        assert summary["tokens"] * store.manifest.shape.bytes_per_token == summary["bytes"]
    for engine in ("sglang", "vllm"):
        assert (out / f"drafter-{engine}/model.safetensors").exists()
    shown = capfd.readouterr().out
    for said in (
        "hsdump extract",
        "hsdump train",
        "hsdump export",
        "acceptance length",
        "lossless",
        "With a real server",
    ):
        assert said in shown


def test_the_target_is_small_and_made_by_its_script() -> None:
    assert sum(path.stat().st_size for path in run.TARGET.glob("*.safetensors")) <= 8_000_000
    config = json.loads((run.TARGET / "config.json").read_text())
    assert config["num_hidden_layers"] >= 8
    log = (run.TARGET / "training.log").read_text()
    assert "held-out loss" in log
    assert (run.TARGET / "chat_template.jinja").read_text() == tokenizer.CHAT_TEMPLATE


def test_questions_to_test_with_come_from_files_that_nobody_learned_from() -> None:
    learned, unseen = (train_target.library_files(held_out=side) for side in (False, True))
    assert {path.name for path in unseen} == train_target.HELD_OUT
    assert not set(learned) & set(unseen)
    assert all(one.head and one.rest for one in train_target.exchanges(unseen[:2], seed=0))


def test_answers_are_those_of_generate() -> None:
    """The demo decodes for itself, because `generate` takes four times as long; it must not say anything else."""
    import torch
    from transformers import AutoModelForCausalLM

    from hsdump.demo.answering import Answerer
    from hsdump.demo.questions import answer

    model = AutoModelForCausalLM.from_pretrained(run.TARGET, dtype=torch.float32).eval()
    asked = [("a", [1, 300, 301, 302, 303]), ("b", list(range(400, 421))), ("c", [1, 7, 8])]
    rows = answer(model, asked, 24)
    assert Answerer(model).answer([ids for _, ids in asked], 24) == [
        row["input_ids"][len(ids) :] for row, (_, ids) in zip(rows, asked, strict=True)
    ]


def test_a_step_that_fails_ends_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Demo, "_ask", lambda _self: None)
    assert main(["--out", str(tmp_path / "out")]) == InputError.exit_code, "there are no answers to read"
    assert f"the demo ends here: hsdump extract gave exit code {InputError.exit_code}" in capsys.readouterr().out


def test_a_step_beside_another_that_fails_ends_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []

    def steps(self: Demo) -> int:
        started.append(self._start("verify", tmp_path / "nothing"))
        endless = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.PIPE)
        started.append(run._Beside(("export", "drafter"), endless, Future()))
        self.beside.append(started[-1])
        return self._end(started[0])

    monkeypatch.setattr(Demo, "_steps", steps)
    assert main(["--out", str(tmp_path / "out")]) == StoreError.exit_code
    shown = capsys.readouterr().out
    assert f"hsdump verify {tmp_path / 'nothing'}" in shown
    assert "fix:" in shown
    assert f"the demo ends here: hsdump verify gave exit code {StoreError.exit_code}" in shown
    assert "hsdump export drafter" in shown.partition("stopped: ")[2]
    assert all(beside.process.returncode is not None for beside in started), "nothing goes on alone"


def test_stopping_at_the_keyboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(_self: Demo) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Demo, "_ask", stop)
    assert main(["--out", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "hsdump demo: stopped\n"
