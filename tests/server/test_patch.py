"""Patched sources of releases without a plugin API, at run time: the same states, and the same server afterwards."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import numpy as np
import pytest

from hsdump.patch.site import find_site
from hsdump.patch.status import status
from hsdump.verify.probing import ProbeOptions, probe_server
from tests.patch.releases import tree, unpack
from tests.server.driving import TOLERANCE, capture, ordinary_traffic, reference, relative_error, token_samples
from tests.server.harness import SglangServer

pytestmark = pytest.mark.server

RUN_END_LIMIT_S = 180.0
"""`hsdump run` imports SGLang once more after the server's end, to prove what it gave back."""


def _prompts() -> list[list[int]]:
    rng = np.random.default_rng(98)
    prefix = rng.integers(3, 2048, 100).tolist()
    return [[*prefix, *rng.integers(3, 2048, length).tolist()] for length in range(5, 45, 5)]


def _check_states(server: SglangServer, model: Path, *, seed: int) -> None:
    """Chunks of 64 rows, sixteen requests at a time, shared prefixes: every state as transformers computes it."""
    samples = token_samples(24, 2048, seed=seed)
    info, states = capture(server.url, samples, in_flight=16)
    assert (info.attach, info.notes, info.hand_over) == ("patch", (), "files")
    errors = []
    for sample in samples:
        expected = reference(model, sample.input_ids, info.shape.layers)
        errors += [relative_error(a, b) for a, b in zip(states[sample.key], expected, strict=True)]
    print(f"SGLang {info.engine_version}: {len(samples)} samples, worst {max(errors):.4f}")  # noqa: T201
    assert max(errors) <= TOLERANCE


def _check_own_ids(server: SglangServer) -> None:
    """By numbers: id k of this engine's own is the output of layer k."""
    report = probe_server(server.url, ProbeOptions(depth="all", fresh=True))
    assert (report.verdict, report.engine_ids, report.table_ids) == ("agrees", [2, 4, 5], [2, 4, 5])
    assert [reading.found for reading in report.states] == ["3", "5", "6", "final"]
    assert report.id_meaning == "id k is the output of layer k"


@pytest.mark.parametrize("version", ["0.5.9", "0.5.10.post1"])
def test_a_run_captures_as_transformers_computes_and_leaves_the_release_as_it_was(
    version: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """With SGLang's own warm-up while capture is on, and Ctrl-C at the end."""
    release = unpack(version, tmp_path / "site packages")
    before = tree(release)
    log = tmp_path / "server.log"
    run = SglangServer(
        model=tiny_llama,
        log=log,
        verb="run",
        tree=release,
        serve_options=("--layers", "native:2,4,5"),
        warm_up=True,
        stop_limit_s=RUN_END_LIMIT_S,
    )
    with run:
        assert status(find_site(folder=release)).state == "patched"
        patched_answers = asyncio.run(ordinary_traffic(run.url, _prompts(), at_once=1))
        _check_states(run, tiny_llama, seed=31)
        _check_own_ids(run)
    text = log.read_text(errors="replace")
    assert "restored; no process runs from this environment" in text
    assert "sha256 of every file equals the original's" in text
    after = {name: facts for name, facts in tree(release).items() if "bak_hsdump" not in name}
    assert {name: facts for name, facts in after.items() if not name.startswith("sglang.hsdump/")} == before
    assert status(find_site(folder=release)).state == "clean"
    if version == "0.5.9":  # one of them is enough: the bytes are the same
        with SglangServer(model=tiny_llama, log=tmp_path / "plain.log", capture=False, tree=release) as plain:
            answers = asyncio.run(ordinary_traffic(plain.url, _prompts(), at_once=1))
        assert [a.output_ids for a in answers] == [a.output_ids for a in patched_answers]


def _let_mla_run_on_cpu(release: Path) -> None:
    """SGLang's default MLA path cannot run on torch_native (see mla_on_cpu, which needs a plugin API)."""
    handler = release / "sglang/srt/models/deepseek_common/attention_backend_handler.py"
    line = 'AttentionBackendRegistry.register("torch_native", lambda _attention, _batch: AttnForwardMethod.MLA)\n'
    handler.write_text(f"{handler.read_text(encoding='utf-8')}\n{line}", encoding="utf-8")


@pytest.mark.parametrize(("file", "layers"), [("llama", "1,4,7"), ("deepseek_v2", "1,3,5")])
def test_the_tap_in_a_models_own_loop_captures_the_same(
    file: str, layers: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """For forks: nothing of SGLang's own auxiliary capture is used. SIGTERM ends this one."""
    model = request.getfixturevalue("tiny_llama" if file == "llama" else "tiny_dsv3")
    release = unpack("0.5.9", tmp_path / "tree")
    if file == "deepseek_v2":
        _let_mla_run_on_cpu(release)
    before = tree(release)
    options = ("--target", f"models/{file}.py", "--layers", layers, "--no-import-check")
    run = SglangServer(
        model=model,
        log=tmp_path / "server.log",
        verb="run",
        tree=release,
        serve_options=options,
        stop_with=signal.SIGTERM,
        stop_limit_s=RUN_END_LIMIT_S,
    )
    with run:
        _check_states(run, model, seed=32)
    after = tree(release)
    assert {name: after[name] for name in before} == before
