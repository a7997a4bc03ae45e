"""What a server answers and hands over is compared with what was sent, for every sample, before anything is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsdump.engines import sglang_http
from hsdump.engines.base import CapturedSample, CaptureFailed, CaptureRequest, ServerAway, ServerLoad
from hsdump.engines.rows import Rows
from hsdump.engines.sglang_http import SglangEngine
from hsdump.locks import AliveLock
from hsdump.spool.names import Rid
from hsdump.spool.reader import FailedNote
from tests.standin import JsonHandler, serving
from tests.unit.test_driver import INFO

KEYS = ("a" * 32, "b" * 32)


class GivenRows:
    """A hand-over of rows that the test made, by the requests' keys."""

    broken = False

    def __init__(self, rows: dict[str, Rows]) -> None:
        self.rows = rows

    def expect(self, rid: Rid) -> None:
        pass

    def poll(self, rid: Rid) -> Rows | FailedNote | None:
        return self.rows.pop(rid.key, None)

    def forget(self, rid: Rid) -> None:
        pass

    def missing(self, rid: Rid) -> str:
        return f"nothing came of {rid.key}"

    def close(self) -> None:
        pass


class Answers:
    """Counts what was given back."""

    def __init__(self) -> None:
        self.released = 0

    def rows(self, ids: Sequence[int], *shapes: tuple[int, int]) -> Rows:
        def release() -> None:
            self.released += 1

        states = tuple(np.zeros(shape, np.uint16) for shape in shapes or [(len(ids), 8)] * 4)
        return Rows(np.asarray(ids, np.int64), states, release)


def capture(
    sent: Sequence[Sequence[int]], rows: Sequence[Rows], status: int = 200, **meta: Any
) -> list[CapturedSample | BaseException]:
    """Send all at once to a server that says `meta` of each; rows go to the requests in order."""

    class Server(JsonHandler):
        def do_POST(self) -> None:  # noqa: N802  # the base class names it so
            ids = self.body().get("input_ids", [])
            if status != 200:
                self.send_error(status, "no")
                return
            self.send({"meta_info": {"prompt_tokens": len(ids), **meta}})

    async def run() -> list[CapturedSample | BaseException]:
        engine = SglangEngine(url)
        engine._info, engine._hand_over = INFO, GivenRows(dict(zip(KEYS, rows, strict=False)))
        requests = [
            CaptureRequest(key=key, input_ids=np.asarray(ids, np.int64), attempt=0)
            for key, ids in zip(KEYS, sent, strict=False)
        ]
        try:
            return await asyncio.gather(*map(engine.capture, requests), return_exceptions=True)
        finally:
            await engine.close()

    with serving(Server) as url:
        return asyncio.run(run())


def reason(found: CapturedSample | BaseException) -> tuple[str, bool, str]:
    assert isinstance(found, CaptureFailed)
    return found.reason, found.transient, found.detail


def test_what_fits_is_taken() -> None:
    (found,) = capture([[1, 2, 3]], [Answers().rows([1, 2, 3])])
    assert isinstance(found, CapturedSample)
    assert [state.shape for state in found.states] == [(3, 8)] * 4


def test_rows_of_another_request_are_never_taken() -> None:
    answers = Answers()
    found = capture([[1, 2, 3], [4, 5, 6]], [answers.rows([4, 5, 6]), answers.rows([1, 2, 3])])
    assert [reason(one) for one in found] == [
        ("wrong-tokens", True, "row 0 is token 4, expected was 1"),
        ("wrong-tokens", True, "row 0 is token 1, expected was 4"),
    ]
    assert answers.released == 2
    found = capture([[1, 2, 3], [4, 5, 6, 7, 8]], [answers.rows([4, 5, 6, 7, 8]), answers.rows([1, 2, 3])])
    assert [reason(one)[2] for one in found] == [
        "rows of 5 tokens came, 3 were sent",
        "rows of 3 tokens came, 5 were sent",
    ]


def test_a_server_that_was_started_anew_in_the_same_spool_is_greeted_first(tmp_path: Path) -> None:
    """It may have another model, or other layers of the same number: nothing of it is taken unseen."""
    announcement = tmp_path / "server-7.json"
    announcement.write_text("{}")
    answers = Answers()

    class Server(JsonHandler):
        def do_GET(self) -> None:  # noqa: N802  # the base class names it so
            self.send({"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]})

        def do_POST(self) -> None:  # noqa: N802
            self.body()
            self.send({"meta_info": {"prompt_tokens": 3}})

    async def run(url: str, *, anew: bool = False) -> tuple[object, object, bool]:
        engine = SglangEngine(url)
        engine._info, engine._hand_over = INFO, GivenRows({KEYS[0]: answers.rows([1, 2, 3])})
        engine._announced = {announcement: sglang_http._mark(announcement)}
        if anew:
            other = tmp_path / "partial"
            other.write_text("{}")
            other.rename(announcement)
        request = CaptureRequest(key=KEYS[0], input_ids=np.asarray([1, 2, 3], np.int64), attempt=0)
        captured, load = await asyncio.gather(engine.capture(request), engine.load(), return_exceptions=True)
        await engine.close()
        return captured, load, engine.lost

    with serving(Server) as url:
        lives = AliveLock(announcement.with_suffix(".lock"))
        captured, load, lost = asyncio.run(run(url))
        assert (type(captured), type(load), lost) == (CapturedSample, ServerLoad, False)
        captured, load, lost = asyncio.run(run(url, anew=True))
        assert (type(captured), type(load), lost) == (ServerAway, ServerAway, True)
        assert answers.released == 1
        lives.release()
        # Killed, and another one answers there, from a spool of its own: what was captured before its death counts.
        captured, load, lost = asyncio.run(run(url))
        assert (type(captured), type(load), lost) == (CapturedSample, ServerAway, True)


@pytest.mark.parametrize("ids", [[], [1, 2], [1, 2, 3, 4]])
def test_too_few_or_too_many_rows_are_never_padded_or_cut(ids: list[int]) -> None:
    (found,) = capture([[1, 2, 3]], [Answers().rows(ids)])
    assert reason(found) == ("wrong-tokens", True, f"rows of {len(ids)} tokens came, 3 were sent")


@pytest.mark.parametrize("shapes", [[(3, 8)] * 3, [(3, 8)] * 3 + [(3, 16)], [(3, 8)] * 3 + [(2, 8)]])
def test_states_of_another_number_or_shape_are_refused(shapes: list[tuple[int, int]]) -> None:
    answers = Answers()
    (found,) = capture([[1, 2, 3]], [answers.rows([1, 2, 3], *shapes)])
    assert reason(found)[0] == "other-shape"
    assert str(shapes[-1]) in reason(found)[2]
    assert answers.released == 1


def test_a_cached_prefix_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_http, "CACHED_WAIT_S", 0.05)
    (found,) = capture([list(range(12))], [], cached_tokens=8)
    name, transient, detail = reason(found)
    assert (name, transient) == ("prefix-cached", False)
    assert detail.startswith("8 of 12 tokens came from the prefix cache")
    assert "--disable-radix-cache" in detail


def test_a_prompt_that_the_server_cut_is_refused_and_not_sent_again() -> None:
    (found,) = capture([[1, 2, 3]], [Answers().rows([1, 2])], prompt_tokens=2)
    assert reason(found) == ("cut-by-server", False, "the server took 2 of 3 tokens (--allow-auto-truncate?)")


@pytest.mark.parametrize(
    ("status", "name", "again"),
    [
        (400, "rejected-by-server", False),
        (413, "rejected-by-server", False),
        (429, "server-error", True),
        (500, "server-error", True),
        (503, "server-error", True),
    ],
)
def test_what_the_server_refuses_is_sent_again_only_where_that_may_help(status: int, name: str, again: bool) -> None:
    (found,) = capture([[1, 2, 3]], [], status)
    assert reason(found)[:2] == (name, again)
    assert reason(found)[2].startswith(f"HTTP {status}: ")
