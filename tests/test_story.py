"""The story of one drafter, in small: every stage but the server's, in one process; cut and gone on with."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.serving import load
from benchmarks.serving.servers import Target, end_left_over, free_port
from benchmarks.story import bench, drafting, lesson, report, run, serving, target, text
from benchmarks.story.scale import SCALES
from benchmarks.story.state import CLEANING, OutOfTime, StepFailed, Stopped, Story, write
from benchmarks.story.together import together
from benchmarks.story.writer import writing
from benchmarks.train import smoke, speed, variants

from hsdump.store import Store
from tests import standin
from tests.standin import JsonHandler

WORDS = ["--device", "cpu", "--scale", "test", "--engine", "transformers", "--in-process"]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tell the whole story once."""
    folder = tmp_path_factory.mktemp("story")
    assert run.main([*WORDS, "--out", str(folder / "out"), "--work", str(folder / "work")]) == run.DONE
    return folder


def test_every_stage_leaves_its_figures(told: Path) -> None:
    story = json.loads((told / "out/story.json").read_text())
    steps = story["steps"]
    names = {"target.text", "target.train", "serve.generate", "serve.extract", "serve.verify"}
    names |= {"draft.vocab", "draft.train", "draft.export", "bench.eval-2", "lesson.stores", "lesson.untrained"}
    names |= {f"lesson.{kind}" for kind in lesson.KINDS} | {f"lesson.check-{kind}" for kind in lesson.KINDS}
    assert set(steps) == names
    assert steps["serve.extract"]["committed"] == steps["serve.generate"]["answers"] == SCALES["test"].learn
    assert steps["serve.verify"]["verdict"] == "clean"
    assert steps["target.train"]["dense_error"] < 1e-5  # sums of a few products of float32, in another order
    # The same weights, rounded to bfloat16 and read back with other rotary settings that mean the same.
    assert steps["target.train"]["written_loss"] == pytest.approx(steps["target.train"]["trained_loss"], rel=1e-2)
    assert steps["bench.eval-2"]["lossless"] or steps["bench.eval-2"]["near_ties"]
    assert str(told) not in json.dumps(story)
    assert (story["errors"], story["postponed"]) == ([], [])
    assert story["free_gib"]["work"] > 0
    assert {path.name for path in (told / "out").iterdir()} == {"story.json", "logs.txt", "drafter-progress.csv"}


def test_what_is_done_is_not_done_again(told: Path) -> None:
    before = (told / "work/done/target.train.json").stat().st_mtime_ns
    # Less than any step asks for is left, and no step is begun.
    words = [*WORDS, "--out", str(told / "again"), "--work", str(told / "work"), "--seconds", "1"]
    assert run.main(words) == run.DONE
    assert (told / "work/done/target.train.json").stat().st_mtime_ns == before
    steps = json.loads((told / "again/story.json").read_text())["steps"]
    assert set(steps) == set(json.loads((told / "out/story.json").read_text())["steps"])


def test_the_report_shows_all_of_it(told: Path) -> None:
    story = json.loads((told / "out/story.json").read_text())
    page = report.report(story)
    for words in ("## Target", "## Served, captured, proved", "## Drafter", "## Decoding", "## The lesson", "## Time"):
        assert words in page
    assert all(words in page for words in report.KINDS.values())
    assert set(report.KINDS) == {*lesson.KINDS, "untrained"}


def test_pretraining_that_is_cut_goes_on(told: Path, tmp_path: Path) -> None:
    scale, data = SCALES["test"], told / "work/data"
    settings = {"device": "cpu", "llama": False}
    assert target.train_target(scale, data, tmp_path, left_s=lambda: -1.0, **settings) is None
    kept = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert kept["number"] == 1
    # Nearly all of the time is spent: what follows are the last steps, not the first ones.
    kept["seconds"] = scale.target_s - 0.2
    torch.save(kept, tmp_path / "checkpoint.pt")
    figures = target.train_target(scale, data, tmp_path, left_s=lambda: 100.0, **settings)
    assert figures["steps"] > 1
    assert figures["seconds"] >= scale.target_s
    assert not (tmp_path / "checkpoint.pt").exists()
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["rope_scaling"]["type"] == "yarn"  # SGLang's DeepSeek code reads this form only
    assert config["topk_method"] == "noaux_tc"


def make_story(folder: Path, seconds: float) -> Story:
    places = {"work": folder / "work", "out": folder / "out"}
    places["work"].mkdir()
    where = Target(device="cpu")
    return Story(scale=SCALES["test"], device="cpu", target=where, until_s=time.monotonic() + seconds, **places)


def test_a_step_without_time_is_left_to_the_next_call(tmp_path: Path) -> None:
    story = make_story(tmp_path, seconds=5)
    with pytest.raises(OutOfTime, match="later needs 60 s, 5 s are left"):
        story.step("later", 60, dict)
    assert story.figures("later") is None
    assert story.step("now", 1, lambda: {"found": 1})["found"] == 1
    assert story.step("now", 1, lambda: {"found": 2})["found"] == 1


def test_a_stage_waits_for_what_another_process_makes(tmp_path: Path) -> None:
    story = make_story(tmp_path, seconds=60)
    assert run.wait_for_makings(story, "lesson") == ["draft.vocab"]
    story.wait_s = 30.0
    later = threading.Timer(0.6, lambda: write(story.work / "done/draft.vocab.json", {}))
    later.start()
    assert run.wait_for_makings(story, "lesson") == []
    later.join()


def test_a_step_that_was_cut_counts_all_its_time(tmp_path: Path) -> None:
    story = make_story(tmp_path, seconds=60)

    def cut() -> dict[str, Any]:
        time.sleep(0.05)
        raise OutOfTime("cut")

    with pytest.raises(OutOfTime):
        story.step("long", 1, cut)
    assert story.step("long", 1, dict)["step_seconds"] >= 0.05


def test_a_command_that_fails_is_told_with_its_words(tmp_path: Path) -> None:
    story = make_story(tmp_path, seconds=60)
    story.in_process = True
    with pytest.raises(StepFailed, match=r"hsdump verify .*: exit code 74"):
        story.hsdump("verify", tmp_path / "nothing")


def test_a_call_that_is_out_of_time_says_to_call_again(told: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--stages", "target", "--out", str(told / "no"), "--work", str(told / "new"), "--seconds", "1"]
    assert run.main(words) == run.CALL_AGAIN
    assert "the same command goes on" in capsys.readouterr().out


def test_stores_are_wrong_in_the_way_they_are_named(told: Path, tmp_path: Path) -> None:
    store, model = told / "work/store", told / "work/target/model"
    kinds = ("layers-shifted", "pre-norm-final", "rows-shifted", "transformers", "prompts-only")
    variants.make(store, model, {kind: tmp_path / kind for kind in kinds})
    with Store(store) as sound:
        sample = sound[0]
        states = list(sample.states.values())
        for kind in kinds[:4]:
            with Store(tmp_path / kind) as wrong:
                assert wrong.manifest.digest == sound.manifest.digest
                found = list(next(one for one in wrong if one.key == sample.key).states.values())
            same = [bool(np.array_equal(one, other)) for one, other in zip(found, states, strict=True)]
            # The embedded engine made this store, so transformers gives its very bits again.
            expected = {"layers-shifted": [False, False, False, True], "pre-norm-final": [True, True, True, False]}
            assert same == expected.get(kind, [kind == "transformers"] * 4)
        with Store(tmp_path / "prompts-only") as prompts:
            assert all(one.loss_mask.all() for one in prompts)
            assert sum(one.num_tokens for one in prompts) < sound.totals()[1]


def test_prose_is_cut_and_other_files_are_left(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(f"line {number}" for number in range(20)))
    (tmp_path / "b.txt").write_bytes(b"\x00\x01" * 50)
    (tmp_path / "c.py").write_text("def broken(:\n")
    found = text.cut([tmp_path / name for name in ("a.txt", "b.txt", "c.py", "missing.txt")], 0.0)
    assert [(apart, exchange.source) for apart, exchange in found] == [(False, "a.txt#0")]
    assert found[0][1].head.splitlines()[-1] == "line 4"


class FakeServer(JsonHandler):
    """A server with drafts at /spec and one without at /plain; they part at the third token of the second prompt."""

    def do_POST(self) -> None:  # noqa: N802  # the base class calls it so
        body = self.body()
        spec = self.path.startswith("/spec")
        answer = [1, 2, 9 if spec and body["input_ids"] == [8] else 3]
        meta: dict[str, Any] = {}
        if body.get("return_logprob"):
            assert body["input_ids"] == [8, 1, 2]  # the prompt, and what both said before they parted
            meta["output_top_logprobs"] = [[[-0.6, 3, None], [-0.7, 9, None]]]
        self.send({"output_ids": answer, "meta_info": meta})


@pytest.fixture
def url() -> Iterator[str]:
    with standin.serving(FakeServer) as found:
        yield found


def test_where_outputs_part_the_two_logits_say_how_near_a_tie_it_was(url: str) -> None:
    found = bench.lossless(f"{url}/spec", f"{url}/plain", [[7], [8]], 3)
    assert (found["identical"], found["differing_at_a_near_tie"], found["differing_otherwise"]) == (1, 1, 0)
    assert found["parted"] == [
        {
            "prompt": 1,
            "place": 2,
            "chosen": [9, 3],
            "tokens": [3, 9],
            "logprobs": [-0.6, -0.7],
            "margin": pytest.approx(0.1),
        }
    ]


def test_a_token_that_is_not_among_the_likeliest_is_no_tie(url: str) -> None:
    assert bench.how_near(f"{url}/plain", [8, 1, 2], [9, 3])["margin"] == pytest.approx(0.1)
    assert bench.how_near(f"{url}/plain", [8, 1, 2], [3, 17])["margin"] is None
    assert bench.how_near(f"{url}/plain", [8, 1, 2], [None, 3])["margin"] is None


def test_what_only_writes_says_how_much_it_wrote_and_leaves_nothing(tmp_path: Path) -> None:
    with writing(tmp_path / "written", 64e6) as written:
        until = time.monotonic() + 30
        while not any(path.stat().st_size for path in (tmp_path / "written").iterdir()):
            assert time.monotonic() < until
            time.sleep(0.05)
    assert written.bytes_per_s > 0
    assert not (tmp_path / "written").exists()
    command = [sys.executable, "-m", "benchmarks.story.writer", str(tmp_path / "not-there"), "1e6"]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode != 0


def test_the_arithmetic_of_a_gain() -> None:
    """A round of 3 ms beside a forward of 1.5 ms: two tokens a round break even, 2.5 gain a quarter."""
    row = {"concurrency": 1, "seconds": 3.0, "drafts": 1000, "acceptance_length": 2.5, "tokens_per_s": 2500 / 3.0}
    found = bench.with_arithmetic(row, {"concurrency": 1, "seconds": 3.0, "tokens": 2000, "tokens_per_s": 2000 / 3.0})
    assert found["round_ms"] == 3.0
    assert found["plain_forward_ms"] == 1.5
    assert found["break_even_length"] == pytest.approx(2.0)
    assert found["speedup"] == pytest.approx(1.25)


@contextmanager
def noted_server(log: list[str], name: str) -> Iterator[str]:
    if name == "bad":
        raise RuntimeError("no server")
    log.append(f"{name} up")
    try:
        yield f"http://{name}"
    finally:
        log.append(f"{name} down")


def starts(log: list[str], *names: str) -> dict[str, Any]:
    return {name: partial(noted_server, log, name) for name in names}


def test_servers_beside_one_that_fails_are_stopped() -> None:
    log: list[str] = []
    with together(starts(log, "a", "b"), at_once=2) as urls:
        assert urls == {"a": "http://a", "b": "http://b"}
    with pytest.raises(RuntimeError, match="no server"), together(starts(log, "c", "bad"), at_once=2):
        pass
    assert sorted(log) == ["a down", "a up", "b down", "b up", "c down", "c up"]


def test_a_server_that_fails_is_told_and_the_others_are_used() -> None:
    told: list[str] = []

    def note(name: str, error: Exception) -> None:
        told.append(f"{name}: {error}")

    with together(starts([], "a", "bad"), at_once=2, needed=("a",), note=note) as urls:
        assert urls == {"a": "http://a"}
    assert told == ["bad: no server"]
    with pytest.raises(RuntimeError), together(starts([], "a", "bad"), at_once=2, needed=("bad",), note=note):
        pass


def test_a_step_that_fails_or_is_too_long_is_not_in_the_way_of_the_others(tmp_path: Path) -> None:
    story = make_story(tmp_path, seconds=30)

    def fails() -> dict[str, Any]:
        raise StepFailed("hsdump bench: exit code 1\nno such thing")

    assert story.attempt("one", 1, fails) is None
    assert story.attempt("long", 60, dict) is None
    assert story.attempt("short", 5, lambda: {"found": 1}) is not None
    written = json.loads((tmp_path / "out/story.json").read_text())
    assert [(one["step"], one["error"].splitlines()[-1]) for one in written["errors"]] == [("one", "no such thing")]
    assert "long needs 60 s" in written["postponed"][0]
    with pytest.raises(Stopped):
        story.attempt("stopped", 1, stop_now)
    CLEANING.clear()


def stop_now() -> dict[str, Any]:
    raise Stopped("the alarm")


def test_a_stage_that_fails_is_not_in_the_way_of_the_others(
    told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_story: Story) -> None:
        raise ValueError("broken")

    monkeypatch.setitem(run.STAGES, "serve", fails)
    words = [*WORDS, "--stages", "serve,bench", "--out", str(tmp_path), "--work", str(told / "work")]
    try:
        assert run.main(words) == run.FAILED
        written = json.loads((tmp_path / "story.json").read_text())
        assert written["errors"][-1]["error"] == "ValueError: broken"
        assert "bench.eval-2" in written["steps"]
    finally:
        (told / "work/errors.json").unlink()


def test_a_stage_waits_for_what_it_is_made_of(tmp_path: Path) -> None:
    words = [*WORDS, "--stages", "draft,lesson", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    assert run.main(words) == run.CALL_AGAIN
    written = json.loads((tmp_path / "out/story.json").read_text())
    assert written["errors"] == []
    assert written["postponed"] == [
        "draft: there is no serve.extract yet",
        "lesson: there is no draft.vocab yet",
    ]


def test_an_alarm_that_a_callback_swallows_comes_again() -> None:
    """asyncio gives whatever a callback raises to its handler of exceptions, and goes on."""

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        asyncio.get_running_loop().call_later(0.02, lambda: time.sleep(0.2))
        await asyncio.sleep(30)

    before = signal.signal(signal.SIGALRM, run._time_is_over)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.2)
    try:
        with pytest.raises(Stopped):
            asyncio.run(work())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_drafters_are_trained_from_all_the_same(tmp_path: Path) -> None:
    story = make_story(tmp_path, seconds=60)
    write(story.work / "done/serve.verify.json", {"verdict": "clean"})
    write(story.work / "done/serve.prove.json", {"verdict": "not proved"})
    assert drafting.doubts(story) == ["serve.prove: not proved"]
    write(story.work / "done/serve.prove.json", {"verdict": "proved"})
    assert drafting.doubts(story) == []


def test_only_what_a_compiler_says_makes_attention_dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsdump.draft.attention._REFUSED", [])
    story = make_story(tmp_path, seconds=60)
    story.device = "cuda"
    said: list[tuple[object, ...]] = []

    def train(error: str, *words: object) -> dict[str, Any]:
        said.append(words)
        if "dense" in words:
            return {"steps": 1}
        raise StepFailed(error)

    monkeypatch.setattr(story, "hsdump", partial(train, "StoreError: not fit for training"))
    with pytest.raises(StepFailed):
        drafting.train(story)
    monkeypatch.setattr(story, "hsdump", partial(train, "torch._inductor.exc.LoweringException: NoValidChoicesError"))
    assert drafting.train(story)["attention"] == "dense"
    assert drafting.dense(story)
    assert all("--unproved" in words for words in said)  # nothing was verified here


def test_tokens_that_are_no_canonical_text_are_proved_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = make_story(tmp_path, seconds=60)
    said: list[bool] = []

    def answer(*words: object, codes: tuple[int, ...]) -> dict[str, Any]:
        said.append("--no-text" in words)
        if said[-1]:
            return {"verdict": "proved", "words": []}
        return {"verdict": "not proved", "words": [f"1 of 4 samples {serving.OTHER_TOKENS} of their text"]}

    monkeypatch.setattr(story, "hsdump", answer)
    found = story.step("serve.prove", 1, lambda: serving.prove(story, tmp_path, "http://server"))
    assert (found["verdict"], found["with_text"]["verdict"], said) == ("proved", "not proved", [False, True])
    assert serving.prove(story, tmp_path, "http://server")["verdict"] == "proved"
    assert said == [False, True, True]  # the lesson's stores hold the same tokens


def test_rates_are_read_on_long_rows() -> None:
    rows = serving.joined([np.arange(180)] * 100, 1500, 12_345)
    assert [len(row) for row in rows] == [1500] * 8
    assert [len(row) for row in serving.joined([np.arange(180)], 1500, 12_345)] == [180]


def test_requests_in_flight_can_be_said() -> None:
    for function in (load.ordinary, load.captured):
        assert inspect.signature(function).parameters["at_once"].default == 0


def test_ports_of_others_are_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert free_port(port) != port


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_servers_that_a_killed_call_left_are_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '60'], start_new_session=True)"]
    server = subprocess.Popen(command, start_new_session=True)
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        noted = tmp_path / "pids"
        while not (children := Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()):
            time.sleep(0.05)
        begun = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[19]
        noted.write_text(f"{server.pid} {begun}\n{stranger.pid} 1\n")  # 1: another process of this number
        assert set(end_left_over(noted)) == {server.pid, int(children[0])}
        assert server.wait(10) == -signal.SIGKILL
        assert stranger.poll() is None
        assert end_left_over(noted) == []
    finally:
        for process in (server, stranger):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.mark.filterwarnings("ignore")  # flex attention without compilation warns about its speed
def test_the_check_of_attention_in_small() -> None:
    found = smoke.check(4, 2, 16, lengths=(48, 31))
    assert found["works"], found
    assert [(one["dtype"], one["length"]) for one in found["runs"]] == [
        (f"torch.{dtype}", length) for dtype in ("bfloat16", "float32") for length in (48, 31)
    ]


def test_waiting_at_the_start_of_an_epoch_is_told_apart(tmp_path: Path) -> None:
    rows = [(epoch, 0.9 if step == 0 else 0.1) for epoch in range(4) for step in range(3)]
    lines = ["epoch,tokens_per_s,wait_share,gpu_gib"] + [f"{epoch},100,{wait},2.5" for epoch, wait in rows]
    (tmp_path / "progress.csv").write_text("\n".join(lines) + "\n")
    found = speed.figures(tmp_path)
    assert (found["epochs_begun"], found["steps"], found["peak_gpu_gib"]) == (3, 11, 2.5)
    assert found["wait_share_within_epochs"] == pytest.approx(0.1)
    assert found["wait_share"] == pytest.approx((3 * 0.9 + 8 * 0.1) / 11)
    assert speed.samples_for(40) * (1 - speed.HELD_OUT) > 80


def test_their_figures_are_reckoned_as_ours() -> None:
    step = {"tokens_per_s": 1000.0, "step_ms": 500.0, "fetch_frac": 0.2, "loss": 1.0}
    steps = [{**step, "tokens_per_s": 10.0, "at_s": 0.0}] + [{**step, "at_s": float(one)} for one in range(1, 10)]
    found = speed.their_figures({"speculators": "0.9.0", "steps": steps, "peak_gpu_gib": 4.0})
    assert (found["tokens_per_s"], found["tokens_per_s_by_the_clock"], found["steps"]) == (1000.0, 500.0, 9)
    assert speed.ratios({"tokens_per_s": 1500.0, "peak_gpu_gib": 2.0}, found) == {
        "tokens_per_s": 1.5,
        "peak_gpu_gib": 0.5,
    }
