"""The whole way, on the real SGLang: conversations in, other people's requests beside, states as transformers has."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hsdump.layers import eagle3_layers
from hsdump.samples import TokenSample
from hsdump.schema import StateShape
from tests.server.driving import (
    TOLERANCE,
    Answer,
    States,
    capture,
    conversations,
    ordinary_traffic,
    reference,
    relative_error,
    same_or_near_tie,
    stored,
    token_samples,
    worst_error,
    write_rows,
)
from tests.server.harness import SglangServer
from tests.server.routing import routing_agrees

pytestmark = pytest.mark.server

NUM_ROWS = {"llama": 200, "qwen3": 100, "dsv3": 100}
ARCHITECTURES = tuple(NUM_ROWS)


@dataclass(frozen=True, kw_only=True)
class Story:
    """What happened on one model's servers."""

    architecture: str
    model: Path
    report: dict[str, Any]
    shape: StateShape
    states: States
    ids: dict[str, NDArray[np.int64]]
    alone_plain: list[Answer]
    """One at a time, on a server without hsdump."""

    alone_capture: list[Answer]
    """The same on a server with capture on and no extraction."""

    beside: list[Answer]
    """The same prompts while the extraction ran."""

    by_64: dict[int, States]
    """Samples captured in chunks of 64 rows, by how many were in flight."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Story:
    architecture: str = request.param
    model: Path = request.getfixturevalue(f"tiny_{architecture}")
    tmp = tmp_path_factory.mktemp(architecture)
    prompts = _ordinary_prompts()
    rows = _write_input(tmp / "input.jsonl", NUM_ROWS[architecture])
    with SglangServer(model=model, log=tmp / "plain.log", capture=False) as plain:
        alone_plain = asyncio.run(ordinary_traffic(plain.url, prompts, at_once=1))
    options = layers_of(architecture)
    # With SGLang's own warm-up requests, which reach the tap and must not disturb it.
    with SglangServer(model=model, log=tmp / "capture.log", serve_options=options, warm_up=True) as server:
        alone_capture = asyncio.run(ordinary_traffic(server.url, prompts, at_once=1))
        with _ordinary_beside(server.url, prompts) as beside:
            report = _extract(rows, server.url, tmp / "store")
        by_64 = {n: capture(server.url, _chunked_samples(), in_flight=n)[1] for n in (1, 16)}
    shape, states, ids = stored(tmp / "store")
    return Story(
        architecture=architecture,
        model=model,
        report=report,
        shape=shape,
        states=states,
        ids=ids,
        alone_plain=alone_plain,
        alone_capture=alone_capture,
        beside=beside,
        by_64=by_64,
    )


def layers_of(architecture: str) -> tuple[str, ...]:
    """All layers of the mixture-of-experts model, so that its routing can be replayed."""
    return ("--layers", "1,2,3,4,5") if architecture == "dsv3" else ()


def _chunked_samples() -> list[TokenSample]:
    return token_samples(24, 2048, seed=7)


def test_every_row_is_committed_once_and_nothing_failed(story: Story) -> None:
    assert story.report["engine"]["engine_version"] == "0.5.23"
    assert story.report["exit_code"] == 0
    assert story.report["failed"] == {}
    skipped = sum(story.report["skipped"].values())
    rows = NUM_ROWS[story.architecture]
    assert story.report["committed"] + skipped == rows
    assert len(story.states) == story.report["committed"] >= rows * 0.9
    depth = 6 if story.architecture == "dsv3" else 8
    assert story.shape.layers == ((1, 2, 3, 4, 5) if story.architecture == "dsv3" else eagle3_layers(depth))


def test_every_state_of_every_sample_is_what_transformers_computes(story: Story) -> None:
    errors, agreeing = [], 0
    for key, ids in story.ids.items():
        if story.architecture == "dsv3":
            inputs = dict(zip(story.shape.layers, story.states[key], strict=False))
            if not routing_agrees(story.model, ids, inputs):
                continue
        agreeing += 1
        expected = reference(story.model, ids, story.shape.layers)
        errors += [relative_error(a, b) for a, b in zip(story.states[key], expected, strict=True)]
    share = agreeing / len(story.ids)
    print(f"{story.architecture}: {agreeing} of {len(story.ids)} samples compared, worst {max(errors):.4f}")  # noqa: T201
    assert max(errors) <= TOLERANCE
    assert share == 1.0 if story.architecture != "dsv3" else share >= 0.9


def test_ordinary_requests_are_answered_as_without_hsdump(story: Story) -> None:
    """Alone, exactly so. In the company of an extraction a batch is composed differently, which turns near ties."""
    assert [a.output_ids for a in story.alone_capture] == [a.output_ids for a in story.alone_plain]
    assert len(story.beside) >= len(story.alone_plain)
    for number, answer in enumerate(story.beside):
        assert same_or_near_tie(answer, story.alone_plain[number % len(story.alone_plain)])


def test_the_prefix_cache_still_serves_the_others(story: Story) -> None:
    """Ordinary prompts share a prefix of 100 tokens: every answer after the first reuses it."""
    assert min(answer.cached_tokens for answer in story.beside[len(story.alone_plain) :]) >= 64


def test_chunks_and_batches_change_nothing(story: Story, tmp_path: Path) -> None:
    """Chunks of 64 rows and one of 4096, alone and sixteen at a time: the same rows in the same order."""
    args, options = ("--chunked-prefill-size", "4096"), layers_of(story.architecture)
    log = tmp_path / "server.log"
    with SglangServer(model=story.model, log=log, sglang_args=args, serve_options=options) as server:
        whole = [capture(server.url, _chunked_samples(), in_flight=n)[1] for n in (1, 16)]
    for states in (story.by_64[16], *whole):
        if story.architecture == "dsv3":  # routing turns at near ties there; rows must still be the right ones
            assert _median_error(states, story.by_64[1]) <= TOLERANCE
        else:
            assert worst_error(states, story.by_64[1]) <= TOLERANCE


def _median_error(found: States, expected: States) -> float:
    """Median over rows, which a few rerouted tokens do not move, and a shifted row order does."""
    rows = [
        np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)
        for key, states in found.items()
        for a, b in zip(states, expected[key], strict=True)
    ]
    return float(np.median(np.concatenate(rows)))


def test_two_tensor_parallel_ranks_give_the_same_states_once(tiny_llama: Path, tmp_path: Path) -> None:
    """By files, which one rank writes, and by rings, for which each rank copies half of the rows."""
    samples = token_samples(24, 2048, seed=8)
    rows = write_rows(tmp_path / "rows.jsonl", samples)
    for hand_over, rings, ending in (("files", 0, signal.SIGTERM), ("ring", 2, signal.SIGINT)):
        options = ("--hand-over", hand_over, "--spool-bytes", str(64 << 20))
        server = SglangServer(model=tiny_llama, log=tmp_path / "tp2.log", tp=2, serve_options=options, stop_with=ending)
        with server:
            info, _ = capture(server.url, samples[:1])
            report = _extract(rows, server.url, tmp_path / hand_over)
        assert info.spool_dir is not None
        assert not Path(info.spool_dir).exists(), "either signal ends the server, and its spool with it"
        assert (info.tp_size, info.hand_over, info.rings) == (2, hand_over, rings)
        assert report["committed"] == len(samples)
        shape, two, _ = stored(tmp_path / hand_over)
        one = {sample.key: reference(tiny_llama, sample.input_ids, shape.layers) for sample in samples}
        assert worst_error(two, one) <= TOLERANCE


@pytest.mark.parametrize("version", ["0.5.11", "0.5.17"])
def test_the_oldest_and_a_middle_release(tiny_llama: Path, tmp_path: Path, version: str) -> None:
    """As the newest, which is installed and everything else runs on."""
    samples = token_samples(24, 2048, seed=9)
    server = SglangServer(model=tiny_llama, log=tmp_path / "server.log", version=version, warm_up=True)
    with server:
        info, states = capture(server.url, samples)
    assert info.engine_version == version
    assert info.notes == ()
    for sample in samples:
        expected = reference(tiny_llama, sample.input_ids, info.shape.layers)
        found = states[sample.key]
        assert max(relative_error(a, b) for a, b in zip(found, expected, strict=True)) <= TOLERANCE


def _ordinary_prompts() -> list[list[int]]:
    """Give 12 prompts with a shared prefix; nothing of them is in the extraction's input."""
    rng = np.random.default_rng(99)
    prefix = rng.integers(3, 2048, 100).tolist()
    return [[*prefix, *rng.integers(3, 2048, length).tolist()] for length in range(5, 65, 5)]


def _write_input(path: Path, count: int) -> Path:
    """Write rows: all conversations at hand, filled up with rows of tokens that share prefixes."""
    rows: list[dict[str, Any]] = conversations()[:count]
    fill = token_samples(count - len(rows), 2048, seed=3)
    rows += [{"input_ids": s.input_ids.tolist(), "loss_mask": s.loss_mask.tolist()} for s in fill]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def _extract(rows: Path, url: str, out: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "hsdump.cli.main", "extract", str(rows), "--server", url, "--out", str(out)]
    done = subprocess.run([*command, "--json", *options], capture_output=True, text=True, check=False, timeout=600)
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == report["exit_code"], done.stderr
    return report


@contextmanager
def _ordinary_beside(url: str, prompts: Sequence[Sequence[int]]) -> Iterator[list[Answer]]:
    """Send ordinary requests, four at a time, again and again while the body runs; at least two rounds."""
    answers: list[Answer] = []
    done = threading.Event()

    def run() -> None:
        rounds = 0
        while rounds < 2 or not done.is_set():
            answers.extend(asyncio.run(ordinary_traffic(url, prompts, at_once=4)))
            rounds += 1
            done.wait(4.0)  # two cores: leave most of them to the extraction

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield answers
    finally:
        done.set()
        thread.join()
