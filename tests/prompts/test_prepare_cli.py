"""`hsdump prepare` as a script sees it: files, JSON, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from hsdump.cli import prepare as verb
from hsdump.errors import HsdumpError
from hsdump.prompts import PromptOptions, read_samples
from hsdump.prompts.samples_file import read_settings
from hsdump.samples import TokenSample

GOOD = {"messages": [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Blue."}]}
BAD = '{"messages": [{"ro\n'


def run(*arguments: Any) -> tuple[int, str]:
    """Run the verb alone, as `hsdump.cli.main` would: its return value or its error is the exit code."""
    app = typer.Typer()
    app.callback()(lambda: None)
    verb.add_to(app)
    result = CliRunner().invoke(app, ["prepare", *map(str, arguments)], standalone_mode=False)
    if isinstance(result.exception, HsdumpError):
        return result.exception.exit_code, str(result.exception)
    if result.exception is not None:
        raise result.exception
    return int(result.return_value), result.output


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": "a", **GOOD}) + "\n" + json.dumps({"messages": []}) + "\n")
    return path


def test_writes_samples_that_are_input_again(rows: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "samples.parquet"
    code, text = run(rows, "--model", model, "--out", out, "--json")
    report = json.loads(text)
    assert (code, report["rows"], report["samples"], report["skips"]) == (0, 2, 1, {"empty": 1})
    assert json.loads((tmp_path / "deep" / "samples.parquet.report.json").read_text()) == report
    (sample,) = read_samples([out], None, PromptOptions())
    assert isinstance(sample, TokenSample)
    assert (sample.source, len(sample.input_ids)) == ("a", report["tokens"])
    assert int(sample.loss_mask.sum()) == report["loss_tokens"]
    assert pq.read_table(out).column("mask").to_pylist() == ["sentinel"]
    assert read_settings(out)["template_digest"] == report["settings"]["template_digest"]


def test_damaged_rows_show_in_the_exit_code(rows: Path, model: Path, tmp_path: Path) -> None:
    rows.write_text(rows.read_text() + BAD)
    arguments = (rows, "--model", model, "--out", tmp_path / "o.parquet")
    code, text = run(*arguments)
    assert code == verb.ROWS_LOST
    assert "rows.jsonl:3" in text
    assert run(*arguments, "--skip-bad-rows")[0] == 0


def test_nothing_left_is_an_error_with_the_reasons(rows: Path, model: Path, tmp_path: Path) -> None:
    rows.write_text('{"messages": []}\n')
    code, text = run(rows, "--model", model, "--out", tmp_path / "o.parquet")
    assert code == 65
    assert "0 samples from 1 rows (empty 1)" in text
    assert list(tmp_path.iterdir()) == [rows]


def test_show_prints_the_sample(rows: Path, model: Path, tmp_path: Path) -> None:
    _, text = run(rows, "--model", model, "--out", tmp_path / "o.parquet", "--show", "1")
    assert "<|im_start|>assistant\nBlue.<|im_end|>" in text


def test_the_page_shows_masks_lengths_and_reasons(rows: Path, model: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    rows.write_text(rows.read_text() + json.dumps({"id": "<b>", **GOOD, "extra": 1}) + "\n")
    assert run(rows, "--model", model, "--out", tmp_path / "o.parquet", "--html", page)[0] == 0
    text = page.read_text()
    assert "<span class='learned'>Blue.</span><span class='learned special'>&lt;|im_end|&gt;</span>" in text
    assert "<td>empty</td><td class='n'>1</td>" in text
    assert "&lt;b&gt;: same tokens" in text
    assert "16-31" in text
    assert "<b>shape:messages</b>: a" in text
    assert "<script" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--turns", "some"], "--turns some is not known"),
        (["--thinking", "maybe"], "choose one of keep, require, template, drop, refuse"),
        (["--date", "yesterday"], "is no date"),
        (["--role", "elf"], "--role elf has no ="),
        (["--role", "elf=king"], "role 'elf' is mapped to 'king'"),
        (["--chat-template", "/nowhere/x.jinja"], "cannot be read"),
    ],
)
def test_options_that_cannot_be(rows: Path, model: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    code, text = run(rows, "--model", model, "--out", tmp_path / "o.parquet", *arguments)
    assert code == 64
    assert message in text


def test_an_unwritable_folder_is_an_error(rows: Path, model: Path) -> None:
    code, text = run(rows, "--model", model, "--out", "/proc/forbidden/o.parquet")
    assert code == 64
    assert "cannot be written" in text
