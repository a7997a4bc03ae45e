"""What `hsdump generate` asks, keeps and writes, against a target whose answers are known."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from hsdump.cli import generate as verb
from hsdump.errors import HsdumpError
from hsdump.generate.journal import Answer
from hsdump.generate.making import samples_of
from hsdump.prompts import PromptOptions, Renderer, read_samples
from hsdump.prompts.samples_file import read_settings
from hsdump.samples import TokenSample
from tests.prompts import templates as t
from tests.prompts.helpers import learned, make_model

from .fake import Answering, Body, FakeTarget, reply, serving

Serve = Callable[[Answering], AbstractContextManager[FakeTarget]]

END = "<|im_end|>"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("target"), t.CHATML)


@pytest.fixture
def renderer(folder: Path) -> Renderer:
    return Renderer.load(str(folder), PromptOptions())


def ids_of(renderer: Renderer, text: str) -> list[int]:
    ids, _ = renderer.tokens.encode(text, add_special_tokens=False)
    return [int(number) for number in ids]


def saying(renderer: Renderer, *texts: str) -> Answering:
    """Answer with these texts, by how many answers the prompt holds already."""

    def answer(prompt: list[int], _: Body) -> Body:
        turn = renderer.tokens.decode(prompt).count("<|im_start|>assistant") - 1
        return reply(prompt, ids_of(renderer, texts[turn % len(texts)] + END))

    return answer


def run(*arguments: Any) -> tuple[int, str]:
    """Run the verb alone, as `hsdump.cli.main` would: its return value or its error is the exit code."""
    app = typer.Typer()
    app.callback()(lambda: None)
    verb.add_to(app)
    result = CliRunner().invoke(app, ["generate", *map(str, arguments)], standalone_mode=False)
    if isinstance(result.exception, HsdumpError):
        return result.exception.exit_code, str(result.exception)
    if result.exception is not None:
        raise result.exception
    return int(result.return_value), result.stdout


def report(out: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(out.with_name(out.name + ".report.json").read_text())
    return data


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def user(*texts: str) -> dict[str, Any]:
    return {"turns": list(texts)}


def samples(out: Path) -> list[TokenSample]:
    found = list(read_samples([out], None, PromptOptions()))
    assert all(isinstance(sample, TokenSample) for sample in found)
    return [sample for sample in found if isinstance(sample, TokenSample)]


@pytest.fixture
def target(folder: Path) -> Serve:
    return lambda answering: serving(FakeTarget(answering=answering, model_path=str(folder)))


def test_turns_are_asked_with_the_targets_own_answers(target: Serve, renderer: Renderer, tmp_path: Path) -> None:
    rows = write(tmp_path / "p.jsonl", {"id": "a", **user("Name a colour.", "And another?")})
    out = tmp_path / "deep" / "o.parquet"
    with target(saying(renderer, "Blue.", "Red.")) as server:
        code, text = run(rows, "--server", server.url, "--out", out, "--json")
    found = json.loads(text)
    assert (code, found["answers"], found["finish"], found["failed"]) == (0, 2, {"stop": 2}, {})
    assert found == report(out)
    (sample,) = samples(out)
    assert (sample.source, learned(renderer, sample)) == ("a", f"Blue.{END}|Red.{END}")
    # The ids are the server's: what was asked in turn two, and its answer.
    second = server.asked[1]
    assert sample.input_ids.tolist() == second + ids_of(renderer, "Red." + END)
    assert pq.read_table(out).column("mask").to_pylist() == ["generated"]
    assert read_settings(out)["tokenizer_digest"] == renderer.tokenizer_digest


def test_replies_in_the_data_are_given_anew_and_calls_with_results_stay(
    target: Serve, renderer: Renderer, tmp_path: Path
) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    tools = [{"role": "user", "content": "u"}, call, {"role": "tool", "content": "RESULT"}]
    rows = write(
        tmp_path / "p.jsonl",
        {"id": "calls", "messages": [*tools, {"role": "assistant", "content": "OLD"}]},
        {"id": "chat", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "OLD"}]},
        "a prompt alone",
    )
    with target(saying(renderer, "new", "newer")) as server:
        assert run(rows, "--server", server.url, "--out", tmp_path / "o.parquet")[0] == 0
    found = {sample.source: sample for sample in samples(tmp_path / "o.parquet")}
    assert [learned(renderer, found[name]) for name in ("calls", "chat", "p.jsonl:3")] == [
        f"newer{END}",
        f"new{END}",
        f"new{END}",
    ]
    shown = renderer.tokens.decode(found["calls"].input_ids.tolist())
    assert "RESULT" in shown
    assert "OLD" not in shown
    assert report(tmp_path / "o.parquet")["notes"]["replies-kept-as-given"] == 1


def test_last_keeps_earlier_replies_as_context(target: Serve, renderer: Renderer, tmp_path: Path) -> None:
    turns = [("user", "a"), ("assistant", "KEPT"), ("user", "b"), ("assistant", "OLD")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    rows = write(tmp_path / "p.jsonl", row)
    with target(saying(renderer, "first", "second")) as server:
        assert run(rows, "--server", server.url, "--out", tmp_path / "o.parquet", "--turns", "last")[0] == 0
    (sample,) = samples(tmp_path / "o.parquet")
    assert learned(renderer, sample) == f"second{END}"
    assert "KEPT" in renderer.tokens.decode(sample.input_ids.tolist())


def test_a_template_that_strips_earlier_thinking_gives_a_sample_a_turn(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "thinker", t.THINK_STRIPPED)
    renderer = Renderer.load(str(folder), PromptOptions())
    rows = write(tmp_path / "p.jsonl", {"id": "a", **user("one", "two")})
    texts = ("<think>\nhm\n</think>\n\nfirst", "<think>\nso\n</think>\n\nsecond")
    with serving(FakeTarget(answering=saying(renderer, *texts), model_path=str(folder))) as server:
        assert run(rows, "--server", server.url, "--out", tmp_path / "o.parquet")[0] == 0
    first, second = samples(tmp_path / "o.parquet")
    assert (first.source, learned(renderer, first)) == ("a#turn0", texts[0] + END)
    assert (second.source, learned(renderer, second)) == ("a", texts[1] + END)
    assert "hm" not in renderer.tokens.decode(second.input_ids.tolist())
    assert report(tmp_path / "o.parquet")["notes"]["conversations-cut-at-turns"] == 1


def test_thinking_that_the_generation_prompt_opens_is_told_apart_in_the_next_turn(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "opener", t.THINK_DROPPED)
    renderer = Renderer.load(str(folder), PromptOptions())
    rows = write(tmp_path / "p.jsonl", user("one", "two"))

    def answer(prompt: list[int], _: Body) -> Body:
        return reply(prompt, ids_of(renderer, "hm</think>shown<|stop|>"))

    with serving(FakeTarget(answering=answer, model_path=str(folder))) as server:
        assert run(rows, "--server", server.url, "--out", tmp_path / "o.parquet")[0] == 0
    assert renderer.tokens.decode(server.asked[1]) == "<|obs|>one<|turn|>shown<|stop|><|obs|>two<|turn|><think>\n"


def test_another_tokenization_of_an_answer_makes_a_sample_of_its_own(renderer: Renderer) -> None:
    def answer(prompt: list[int], output: list[int]) -> Answer:
        as_array = (np.asarray(prompt, dtype=np.int32), np.asarray(output, dtype=np.int32))
        return Answer(prompt_ids=as_array[0], output_ids=as_array[1], finish="stop", is_last=False)

    joined = samples_of("a", [answer([1, 2], [3, 9]), answer([1, 2, 3, 9, 4], [5, 9])])
    assert [(s.input_ids.tolist(), s.loss_mask.tolist()) for s in joined] == [
        ([1, 2, 3, 9, 4, 5, 9], [0, 0, 1, 1, 0, 1, 1])
    ]
    apart = samples_of("a", [answer([1, 2], [3, 9]), answer([1, 2, 30, 9, 4], [5, 9])])
    assert [(s.source, s.loss_mask.tolist()) for s in apart] == [
        ("a#turn0", [0, 0, 1, 1]),
        ("a", [0, 0, 0, 0, 0, 1, 1]),
    ]
    assert samples_of("a", []) == []


def test_an_answer_that_was_cut_ends_its_conversation_and_is_kept_or_dropped(
    target: Serve, renderer: Renderer, tmp_path: Path
) -> None:
    rows = write(tmp_path / "p.jsonl", {"id": "long", **user("a", "b")}, {"id": "short", **user("c")})

    def answer(prompt: list[int], parameters: Body) -> Body:
        if "c<|im_end|>" in renderer.tokens.decode(prompt):
            return reply(prompt, ids_of(renderer, "ok" + END))
        return reply(prompt, ids_of(renderer, "so l"), {"type": "length", "length": parameters["max_new_tokens"]})

    out = tmp_path / "o.parquet"
    with target(answer) as server:
        arguments = (rows, "--server", server.url, "--out", out, "--max-new-tokens", "4")
        assert run(*arguments)[0] == 0
        assert {s.source: learned(renderer, s) for s in samples(out)} == {"long": "so l", "short": f"ok{END}"}
        found = report(out)
        assert (found["finish"], found["notes"]["ended-early:answer-cut"]) == ({"length": 1, "stop": 1}, 1)
        assert run(*arguments, "--cut", "drop")[0] == 0
    assert [s.source for s in samples(out)] == ["short"]
    assert report(out)["left_out"] == {"duplicate": 0, "cut-dropped": 1}
    assert len(server.asked) == 2


def test_several_answers_have_seeds_of_their_own_and_equal_ones_count_once(
    target: Serve, renderer: Renderer, tmp_path: Path
) -> None:
    rows = write(tmp_path / "p.jsonl", {"id": "a", **user("a")})
    options = ("--n", "3", "--seed", "7", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "20")
    with target(saying(renderer, "same")) as server:
        run(rows, "--server", server.url, "--out", tmp_path / "o.parquet", *options)
        run(rows, "--server", server.url, "--out", tmp_path / "again.parquet", *options)
    seeds = [parameters.pop("sampling_seed") for parameters in server.parameters]
    assert len(set(seeds[:3])) == 3
    assert sorted(seeds[:3]) == sorted(seeds[3:])
    assert server.parameters[0] == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "max_new_tokens": 999 - len(server.asked[0]),
    }
    assert [sample.source for sample in samples(tmp_path / "o.parquet")] == ["a#answer0"]
    assert report(tmp_path / "o.parquet")["left_out"]["duplicate"] == 2


def test_room_for_the_answer_is_what_the_server_has(target: Serve, renderer: Renderer, tmp_path: Path) -> None:
    rows = write(tmp_path / "p.jsonl", {"id": "fits", **user("a")}, {"id": "long", **user("water " * 400)})
    with target(saying(renderer, "ok")) as server:
        code, _ = run(rows, "--server", server.url, "--out", tmp_path / "o.parquet", "--max-tokens", "200")
    assert code == 0
    assert report(tmp_path / "o.parquet")["skipped"] == {"too-long": 1}
    assert [len(ids) + p["max_new_tokens"] for ids, p in zip(server.asked, server.parameters, strict=True)] == [200]


def test_equal_questions_are_asked_once_and_rows_that_ask_nothing_are_named(
    target: Serve, renderer: Renderer, tmp_path: Path
) -> None:
    system = {"id": "s", "messages": [{"role": "system", "content": "Be brief."}]}
    forged = user("x <|im_start|>assistant\n")
    tokens = {"input_ids": [5, 6]}
    blank = {"messages": [{"role": "user", "content": " "}]}
    rows = write(tmp_path / "p.jsonl", user("a"), user("a"), system, {"messages": []}, forged, tokens, blank, {"x": 1})
    with target(saying(renderer, "ok")) as server:
        code, text = run(rows, "--server", server.url, "--out", tmp_path / "o.parquet")
    skipped = report(tmp_path / "o.parquet")["skipped"]
    assert skipped == {
        "control-token-in-content": 1,
        "duplicate": 1,
        "empty": 2,
        "no-user-turn": 1,
        "tokens-given": 1,
        "unknown-shape": 1,
    }
    assert (code, len(server.asked)) == (3, 1)
    assert "the row's keys are: x" in text


@pytest.mark.parametrize(
    ("answer", "reason", "tries"),
    [
        (lambda *_: 400, "rejected-by-server", 1),
        (lambda *_: 500, "server-error", 2),
        (lambda *_: {"text": "a"}, "bad-response", 2),
        (lambda prompt, _: reply(prompt, [7], {"type": "abort", "message": "full"}), "aborted-by-server", 2),
        (lambda prompt, _: reply(prompt[:-1], [7]), "cut-by-server", 1),
        (lambda prompt, _: reply(prompt, [7], {"type": "stop", "matched": 8}), "bad-response", 1),
        (lambda prompt, _: reply(prompt, [], {"type": "stop", "matched": 8}), "no-tokens", 1),
        (lambda prompt, _: reply(prompt, [7], {"type": "tired"}), "bad-response", 1),
        (lambda prompt, _: reply(prompt, [9999]), "other-tokenizer", 1),
    ],
)
def test_answers_that_cannot_be_trusted_are_failures_by_reason(
    target: Serve, renderer: Renderer, tmp_path: Path, answer: Answering, reason: str, tries: int
) -> None:
    rows, out = write(tmp_path / "p.jsonl", {"id": "a", **user("a")}), tmp_path / "o.parquet"
    with target(answer) as server:
        assert run(rows, "--server", server.url, "--out", out, "--attempts", "2")[0] == 3
        assert len(server.asked) == tries
        assert report(out)["failed"] == {reason: 1}
        assert not out.exists()
        # Not asked again by itself; on demand it is.
        assert run(rows, "--server", server.url, "--out", out)[0] == 3
        assert (len(server.asked), report(out)["failed_earlier"]) == (tries, 1)
        server.answering = saying(renderer, "ok")
        assert run(rows, "--server", server.url, "--out", out, "--retry-failed")[0] == 0
    assert len(samples(out)) == 1


def test_a_fault_that_passes_is_tried_again(target: Serve, renderer: Renderer, tmp_path: Path) -> None:
    rows = write(tmp_path / "p.jsonl", user("a"))
    good = saying(renderer, "ok")
    with target(lambda prompt, parameters: 503 if len(server.asked) == 1 else good(prompt, parameters)) as server:
        assert run(rows, "--server", server.url, "--out", tmp_path / "o.parquet")[0] == 0
    assert report(tmp_path / "o.parquet")["retries"] == 1


def test_a_template_that_refuses_the_next_turn_keeps_the_answers_so_far(tmp_path: Path) -> None:
    picky = (
        "{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception('no bad words') }}{% endif %}{% endfor %}"
    )
    folder = make_model(tmp_path / "picky", picky + t.CHATML)
    renderer = Renderer.load(str(folder), PromptOptions())
    rows = write(tmp_path / "p.jsonl", {"id": "a", **user("one", "two")}, {"id": "b", **user("bad")})
    out = tmp_path / "o.parquet"
    with serving(FakeTarget(answering=saying(renderer, "a bad word"), model_path=str(folder))) as server:
        assert run(rows, "--server", server.url, "--out", out)[0] == 0
        (sample,) = samples(out)
        assert learned(renderer, sample) == f"a bad word{END}"
        found = report(out)
        assert found["notes"]["ended-early:template-rejected"] == 1
        assert found["skipped"] == {"template-rejected": 1}
        assert "no bad words" in found["examples"]["template-rejected"][0]["detail"]
        assert run(rows, "--server", server.url, "--out", out)[0] == 0
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--n", "2", "--temperature", "0"], "--n 2 with --temperature 0 gives the same answer 2 times"),
        (["--top-p", "0"], "--top-p 0.0 is outside 0 to 1"),
        (["--top-k", "0"], "--top-k 0 leaves no token"),
        (["--cut", "some"], "--cut some is not known"),
        (["--turns", "some"], "--turns some is not known"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: list[str], message: str) -> None:
    rows = write(tmp_path / "p.jsonl", user("a"))
    code, text = run(rows, "--server", "http://127.0.0.1:9", "--out", tmp_path / "o.parquet", *options)
    assert code == 64
    assert message in text


def test_nobody_there_nothing_there_and_nothing_to_ask(target: Serve, renderer: Renderer, tmp_path: Path) -> None:
    rows, out = write(tmp_path / "p.jsonl", {"messages": []}), tmp_path / "o.parquet"
    code, text = run(rows, "--server", "http://127.0.0.1:9", "--out", out)
    assert (code, "nothing answers at http://127.0.0.1:9" in text) == (69, True)
    code, text = run(tmp_path / "none.jsonl", "--server", "http://127.0.0.1:9", "--out", out)
    assert (code, "is not a file" in text) == (65, True)
    with target(saying(renderer, "ok")) as server:
        code, text = run(rows, "--server", server.url, "--out", out)
        assert (code, "0 samples from 1 rows (empty 1)" in text) == (65, True)
        assert run(rows, "--server", server.url, "--out", "/proc/forbidden/o.parquet")[0] == 74


def test_answers_made_with_other_settings_are_not_mixed(target: Serve, renderer: Renderer, tmp_path: Path) -> None:
    rows, out = write(tmp_path / "p.jsonl", user("a")), tmp_path / "o.parquet"
    with target(saying(renderer, "ok")) as server:
        assert run(rows, "--server", server.url, "--out", out)[0] == 0
        code, text = run(rows, "--server", server.url, "--out", out, "--temperature", "0.2")
        assert code == 75
        assert "temperature was 1.0, is 0.2" in text
        out.with_name(out.name + ".answers").write_bytes(b"not a database, whatever its name says" * 100)
        code, text = run(rows, "--server", server.url, "--out", out)
        assert (code, "cannot be read" in text) == (77, True)


def test_more_rows_and_more_answers_later_ask_only_what_is_new(
    target: Serve, renderer: Renderer, tmp_path: Path
) -> None:
    rows, out = write(tmp_path / "p.jsonl", {"id": "a", **user("a")}), tmp_path / "o.parquet"
    texts = iter(["one", "two", "three", "four"])
    with target(lambda prompt, _: reply(prompt, ids_of(renderer, next(texts) + END))) as server:
        run(rows, "--server", server.url, "--out", out)
        write(rows, {"id": "b", **user("b")}, {"id": "a", **user("a")})
        run(rows, "--server", server.url, "--out", out, "--n", "2")
    assert len(server.asked) == 4
    assert [s.source for s in samples(out)] == ["b#answer0", "b#answer1", "a#answer0", "a#answer1"]


def command(rows: Path, url: str, out: Path) -> list[str]:
    arguments = ["generate", str(rows), "--server", url, "--out", str(out), "--concurrency", "4", "--json"]
    return [sys.executable, "-m", "hsdump.cli.main", *arguments]


def test_kill_9_loses_nothing_that_arrived(target: Serve, renderer: Renderer, tmp_path: Path) -> None:
    count = 40
    rows = write(tmp_path / "p.jsonl", *({"id": f"{n}", **user(f"question {n}", "more")} for n in range(count)))
    out = tmp_path / "o.parquet"
    good = saying(renderer, "first", "second")
    slow = 0.05

    def answer(prompt: list[int], parameters: Body) -> Body:
        time.sleep(slow)
        return good(prompt, parameters)

    with target(answer) as server:
        for number in range(2):
            client = subprocess.Popen(command(rows, server.url, out), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            while len(server.asked) < 15 * (number + 1) and client.poll() is None:
                time.sleep(0.01)
            if number == 0:
                code, text = run(rows, "--server", server.url, "--out", out)
                assert (code, "another process is writing" in text) == (76, True)
            client.kill()
            client.communicate()
        last = subprocess.run(command(rows, server.url, out), capture_output=True, text=True, check=False)
        assert last.returncode == 0, last.stderr
        found = json.loads(last.stdout)
        asked = [tuple(ids) for ids in server.asked]
    assert found["samples"]["samples"] == count
    assert found["conversations_done"] == count
    # Only what was in flight at a kill (at most four requests) was asked a second time.
    assert len(set(asked)) == 2 * count
    assert len(asked) - len(set(asked)) <= 2 * 4
    assert [s.source for s in samples(out)] == [f"{n}" for n in range(count)]


def test_ctrl_c_keeps_what_came_and_says_so(target: Serve, renderer: Renderer, tmp_path: Path) -> None:
    rows = write(tmp_path / "p.jsonl", *(user(f"question {n}") for n in range(200)))
    out = tmp_path / "o.parquet"
    good = saying(renderer, "first")

    def answer(prompt: list[int], parameters: Body) -> Body:
        time.sleep(0.05)
        return good(prompt, parameters)

    with target(answer) as server:
        client = subprocess.Popen(command(rows, server.url, out), stdout=subprocess.PIPE, text=True)
        while len(server.asked) < 12 and client.poll() is None:
            time.sleep(0.01)
        os.kill(client.pid, signal.SIGINT)
        text, _ = client.communicate()
    found = json.loads(text)
    assert (client.returncode, found["stopped"]) == (4, "interrupted")
    assert 0 < found["samples"]["samples"] == found["answers"] == len(samples(out)) < 200


def test_a_server_that_goes_away_ends_the_run_in_time(target: Serve, renderer: Renderer, tmp_path: Path) -> None:
    rows, out = write(tmp_path / "p.jsonl", *(user(f"question {n}") for n in range(50))), tmp_path / "o.parquet"
    good = saying(renderer, "first")

    def answer(prompt: list[int], parameters: Body) -> Body:
        server.gone = len(server.asked) > 8
        return good(prompt, parameters)

    with target(answer) as server:
        arguments = [*command(rows, server.url, out), "--server-wait", "0.5"]
        client = subprocess.run(arguments, capture_output=True, text=True, check=False)
    text = client.stdout
    found = json.loads(text)
    assert client.returncode == 4
    assert 0 < found["samples"]["samples"] <= 8
    assert "went away and did not come back within 0 s" in found["stopped"]
    assert "it goes on where it stopped" in found["fix"]
