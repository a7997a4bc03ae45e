"""The end of the story on the real SGLang: it decodes with our drafter, says the same as without it, and accepts as
much as `hsdump eval` foretold.

On a CPU, where the kernels of the stand-in take the place of AMX's (tests/engine_env/sgl_kernel/speculative.py).
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hsdump.cli.main import main
from hsdump.demo import run as demo
from hsdump.demo.run import TARGET, Places
from hsdump.draft.eval import read_prompts
from tests.server.driving import ordinary_traffic, same_or_near_tie
from tests.server.harness import SglangServer, free_port

pytestmark = pytest.mark.server

NEW_TOKENS = 48

TRAINING = (
    *("--optimizer", "muon", "--lr", "8e-3", "--warmup", "4", "--clip", "1", "--ttt-steps", "3", "--tokens", "1024"),
    *("--epochs", "9", "--max-steps", "45", "--held-out", "0.05"),
)
"""The demo's with less of it: far from what the drafter can reach, and well above nothing."""

PRECISION = ("--dtype", "float32")
"""As `hsdump eval` decodes, so that both come to the same tokens however wide a batch is."""

TIE = 1e-3
"""Nats between the two best tokens, where float32 sums in another order may choose the other."""

# SGLang's platform check would take --attention-backend intel_amx back on a processor without AMX.
EAGLE = (
    *("--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx"),
    *("--speculative-algorithm", "EAGLE3"),
)


def drafts(drafter: Path, steps: object, topk: object, tokens: object) -> tuple[str, ...]:
    """SGLang's arguments for drafts of one shape."""
    shape = (
        "--speculative-num-steps",
        steps,
        "--speculative-eagle-topk",
        topk,
        "--speculative-num-draft-tokens",
        tokens,
    )
    return (*EAGLE, "--speculative-draft-model-path", str(drafter), *map(str, shape))


@dataclass(frozen=True)
class Drafted:
    """A drafter made by the demo, and a server that decodes with chains of three."""

    places: Places
    summary: dict[str, Any]
    url: str

    @property
    def drafter(self) -> Path:
        return self.places.exported("sglang")

    def questions(self) -> list[list[int]]:
        return [list(one.prompt) for one in read_prompts(self.places.questions, str(TARGET), 64)]


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafted]:
    folder = tmp_path_factory.mktemp("drafted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "LEARN", 160)
        patch.setattr(demo, "TEST", 8)
        patch.setattr(demo, "NEW_TOKENS", NEW_TOKENS)
        patch.setattr(demo, "TRAINING", TRAINING)
        assert demo.main(["--out", str(folder / "demo")]) == 0
    places = Places(folder / "demo")
    summary = json.loads(places.summary.read_text())
    args = (*PRECISION, *drafts(places.exported("sglang"), 3, 1, 4))
    with SglangServer(model=TARGET, log=folder / "log", capture=False, sglang_args=args) as server:
        yield Drafted(places, summary, server.url)


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_sglang_accepts_what_eval_foretold_and_says_the_same_as_without(
    drafted: Drafted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with SglangServer(model=TARGET, log=tmp_path / "log", capture=False, sglang_args=PRECISION) as plain:
        words = ("bench", "--server", drafted.url, "--baseline", plain.url, "--prompts", str(drafted.places.questions))
        more = ("--model", str(TARGET), "--new-tokens", str(NEW_TOKENS), "--concurrency", "1,4")
        found = run_json(capsys, *words, *more)
        alone, together = found["rows"]
        assert found["engine"] == "sglang"
        assert [row["acceptance_length"] for row in found["baseline"]] == [None, None]
        assert alone["tokens"] == together["tokens"] == found["baseline"][0]["tokens"]
        foretold = drafted.summary["acceptance_length"]
        print(f"foretold {foretold:.3f}, alone {alone['acceptance_length']:.3f}, {alone['per_position']}")  # noqa: T201
        assert foretold > 1.2, "a drafter that nobody would notice proves nothing"
        # SGLang counts an answer's first token, which prefill gives, and what its last round was cut by: one of 48.
        assert alone["acceptance_length"] == pytest.approx(foretold, rel=2 / NEW_TOKENS)
        assert together["acceptance_length"] == pytest.approx(foretold, rel=2 / NEW_TOKENS)

        questions = drafted.questions()
        with_drafts, without = (
            asyncio.run(ordinary_traffic(url, questions, at_once=1, num_new=NEW_TOKENS))
            for url in (drafted.url, plain.url)
        )
    for fast, slow in zip(with_drafts, without, strict=True):
        assert same_or_near_tie(fast, slow, near=TIE)


def test_a_tree_of_drafts_in_a_server_that_bench_starts(
    drafted: Drafted, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two branches: of the same length as a chain, more is accepted."""
    args = (*PRECISION, *drafts(drafted.drafter, "{steps}", "{topk}", "{tokens}"))
    server = SglangServer(model=TARGET, log=tmp_path / "log", capture=False, sglang_args=args, port=free_port())
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    words = ("bench", "--server", server.url, "--prompts", str(drafted.places.questions), "--model", str(TARGET))
    more = ("--new-tokens", str(NEW_TOKENS), "--concurrency", "4", "--sweep", "3:2:8")
    (found,) = run_json(capsys, *words, *more, "--launch", shlex.join(server.command()))["settings"]
    (row,) = found["rows"]
    assert set(drafts(drafted.drafter, 3, 2, 8)) <= set(shlex.split(found["command"]))
    print(f"chain {drafted.summary['acceptance_length']:.3f}, tree {row['acceptance_length']:.3f}")  # noqa: T201
    assert row["failed"] == 0
    assert row["acceptance_length"] > drafted.summary["acceptance_length"]
