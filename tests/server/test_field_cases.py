"""Bug cases from the field, of the kinds that concern a run: resuming, lengths, settings.

The cases are not part of this repository: HSDUMP_TEST_CASES names a folder with `cases.jsonl` and `templates/`.
Those about replies: tests/unit/test_replies.py (other requests' rows, too few, too many, of another width, from the
cache), test_driver.py (NaN), test_handshake.py, test_tap.py (chunks), tests/server/test_driver.py (503, 400, broken
connections). Those about layer ids: tests/unit/test_layers.py and tests/server/test_proof.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hsdump.store import Store

FOLDER = Path(os.environ.get("HSDUMP_TEST_CASES", "/nowhere"))

pytestmark = pytest.mark.skipif(not (FOLDER / "cases.jsonl").is_file(), reason="HSDUMP_TEST_CASES names no cases")


def case(name: str) -> dict[str, Any]:
    with (FOLDER / "cases.jsonl").open(encoding="utf-8") as file:
        return next(found["input"] for found in map(json.loads, file) if found["id"] == name)


def extract(
    folder: Path, model: Path, records: list[dict[str, Any]], template: str | None, *more: str
) -> tuple[int, dict[str, Any], str]:
    """Run one extract in process; gives exit code, report and messages."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = [sys.executable, "-m", "hsdump.cli.main", "extract", str(rows), "--out", str(folder / "store")]
    command += ["--engine", "transformers", "--model", str(model), "--json", *more]
    if template is not None:
        command += ["--chat-template", str(FOLDER / "templates" / template)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def sources(folder: Path) -> list[str]:
    with Store(folder / "store") as store:
        return sorted(sample.source for sample in store)


@pytest.mark.parametrize("name", ["mask-02-truncation-leaves-nothing", "length-01-longer-than-context"])
def test_too_long_is_skipped_before_it_is_sent_and_counted(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    given = case(name)
    good = [record for record in given["records"] if record["id"] == "good"]
    (tmp_path / "good").mkdir()
    assert extract(tmp_path / "good", tiny_llama, good, given["template"])[0] == 0
    # The tiny tokenizer takes more tokens than the case's: the limit is what the good row needs.
    limit = str(Store(tmp_path / "good" / "store")[0].num_tokens)
    code, report, _ = extract(tmp_path, tiny_llama, given["records"], given["template"], "--max-tokens", limit)
    assert (code, report["skipped"], sources(tmp_path)) == (0, {"too-long": 1}, ["good"])


def test_a_reply_is_cut_only_where_that_is_asked_for(tiny_llama: Path, tmp_path: Path) -> None:
    """Ids, mask and states have one length; all that is left of the reply is learned, and no end of it made up."""
    given = case("mask-03-reply-cut-by-truncation")
    code, report, _ = extract(tmp_path, tiny_llama, given["records"], given["template"], "--max-tokens", "160")
    assert code == 3, "no row survived: that is not a success"
    assert report["skipped"] == {"too-long": 1}
    command = [sys.executable, "-m", "hsdump.cli.main", "prepare", str(tmp_path / "rows.jsonl"), "--json"]
    command += ["--model", str(tiny_llama), "--chat-template", str(FOLDER / "templates" / given["template"])]
    command += ["--max-tokens", "160", "--too-long", "cut", "--out", str(tmp_path / "cut.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["notes"]["samples-cut-at-limit"] == 1
    command = [sys.executable, "-m", "hsdump.cli.main", "extract", str(tmp_path / "cut.parquet")]
    command += ["--engine", "transformers", "--model", str(tiny_llama), "--out", str(tmp_path / "cut")]
    subprocess.run(command, capture_output=True, check=True)
    (sample,) = Store(tmp_path / "cut")
    assert {len(state) for state in sample.states.values()} == {160}
    assert len(sample.input_ids) == len(sample.loss_mask) == 160
    assert sample.loss_mask[int(sample.loss_mask.argmax()) :].all()


def test_without_a_template_only_token_rows_work(tiny_llama: Path, tmp_path: Path) -> None:
    given = case("config-01-no-chat-template")
    bare = tmp_path / "model"
    bare.mkdir()
    for path in tiny_llama.iterdir():
        if path.name == "tokenizer_config.json":
            settings = json.loads(path.read_text())
            settings.pop("chat_template", None)
            (bare / path.name).write_text(json.dumps(settings))
        elif "template" not in path.name:
            (bare / path.name).symlink_to(path)
    (tmp_path / "a").mkdir()
    code, report, errors = extract(tmp_path / "a", bare, given["records"], None)
    assert (code, report["committed"], report["servers"][0]["captured"]) == (4, 0, 0)
    assert "the model has no chat template, and a row holds messages" in errors + json.dumps(report)
    (tmp_path / "b").mkdir()
    tokens = [record for record in given["records"] if "input_ids" in record]
    assert extract(tmp_path / "b", bare, tokens, None)[0] == 0


def test_the_date_of_a_template_is_fixed(tiny_llama: Path, tmp_path: Path) -> None:
    first, second = case("config-03-date-in-template")["runs"]
    template = case("config-03-date-in-template")["template"]
    code, report, errors = extract(tmp_path, tiny_llama, first["records"], template)
    assert report.get("committed") == 1, report or errors
    code, report, _ = extract(tmp_path, tiny_llama, second["records"], template)
    assert (code, report["already_committed"], report["committed"]) == (0, 1, 1)


def test_changed_settings_refuse_to_resume(tiny_llama: Path, tmp_path: Path) -> None:
    runs = case("resume-01-changed-config")["runs"]
    lengths = {32: "132", 64: "164"}  # the tiny tokenizer takes more tokens for the same text
    found = [
        extract(tmp_path, tiny_llama, run["records"], run["template"], "--max-tokens", lengths[run["max_length"]])
        for run in runs
    ]
    assert [code for code, _, _ in found] == [0, 75, 75]
    assert "max_tokens: the store has 132, this run has 164" in found[1][2]
    assert "template_digest" in found[2][2]


@pytest.mark.parametrize(
    ("name", "total"), [("resume-02-identity-not-position", 3), ("resume-03-manifest-keeps-old-entries", 3)]
)
def test_identity_is_content_and_old_entries_stay(name: str, total: int, tiny_llama: Path, tmp_path: Path) -> None:
    first, second = case(name)["runs"]
    before = first["records"][: first.get("max_samples")]
    assert extract(tmp_path, tiny_llama, before, None)[0] == 0
    code, report, _ = extract(tmp_path, tiny_llama, second["records"], None)
    assert (code, report["already_committed"], report["committed"]) == (0, len(before), total - len(before))
    assert len(sources(tmp_path)) == total
