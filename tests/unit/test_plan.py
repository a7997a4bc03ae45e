"""`hsdump plan`: the arithmetic of a capture, and what it says when there is no room."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hsdump.cli.main import main
from hsdump.extract.estimate import Census, Room, estimate
from hsdump.schema import StateShape

KIMI = StateShape(layers=(2, 30, 58), hidden_size=7168, dtype="bfloat16", final_state="post_norm")
STORY = ["plan", "--tokens", "17300000", "--samples", "10000", "--hidden-size", "7168", "--states", "4"]


def room(**changes: object) -> Room:
    return Room(**{"disk_free": None, "disk_reserve": 0, "shm_free": 1 << 40, **changes})  # type: ignore[arg-type]


def test_the_figures_of_the_story(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*STORY, "--dtype", "bfloat16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes_per_token"] == 57344
    assert found["bytes_raw"] == 992051200000
    assert found["bytes_raw"] // 2**30 == 923  # 923.9 GiB


def test_a_disk_that_is_too_small_names_the_bytes_and_a_remedy() -> None:
    census = Census.given(10_000, 17_300_000)
    found = estimate(census, KIMI, "raw", room(disk_free=800 * 10**9))
    assert not found.fits
    assert f"the disk lacks {found.disk_needed - 800 * 10**9:,} bytes" in found.problems[0]
    assert "--codec blosc2 (lossless)" in found.problems[0]
    assert estimate(census, KIMI, "blosc2", room(disk_free=800 * 10**9)).fits


def test_the_longest_sample_decides_the_smallest_spool() -> None:
    census = Census()
    for length in (10, 3000):
        census.add_length(length)
    found = estimate(census, KIMI, "raw", room(spool_bytes=100 << 20))
    assert found.histogram == {"<= 16": 1, "<= 4096": 1}
    assert "the longest sample (3,000 tokens) needs a spool of" in found.problems[0]
    assert estimate(census, KIMI, "raw", room(spool_bytes=found.spool_minimum)).fits


def test_time_at_a_given_rate() -> None:
    assert estimate(Census.given(10, 1000), KIMI, "raw", room(tokens_per_s=50.0)).seconds == 20.0


def test_an_input_is_read_tokenized_and_measured(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = {"messages": [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Two."}]}
    rows = tmp_path / "rows.jsonl"
    lines = [chat, {"input_ids": list(range(3, 3003))}, {"input_ids": [5, 6, 7]}, {"messages": []}]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["plan", str(rows), "--model", str(tiny_llama), "--out", str(tmp_path / "store"), "--json"]
    assert main([*arguments, "--max-tokens", "2000"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["samples"], found["over_context"], found["skips"]["empty"]) == (2, 1, 1)
    assert found["bytes_per_token"] == 4 * 256 * 2
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plan"], 64, "the size of a state is not known"),
        (["plan", "--hidden-size", "8"], 64, "there is nothing to plan"),
        ([*STORY, "--codec", "zip"], 64, "--codec zip is not known"),
        (["plan", "--model", "/nowhere", "--tokens", "5", "--samples", "1"], 65, "/nowhere/config.json cannot be read"),
    ],
)
def test_what_cannot_be_planned(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    assert message in capsys.readouterr().err
