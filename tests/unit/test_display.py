"""What a person reads while an extraction goes on."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console, RenderableType

from hsdump.extract.display import panel, status_line
from hsdump.extract.state import LaneState, RunState


@pytest.mark.parametrize(
    ("captured", "committed", "said"),
    [
        (0, 0, "1000 to go"),
        (500, 0, "ETA 0:00:20"),  # the first commit is yet to come
        (500, 400, "ETA 0:00:20"),
        (1000, 400, "ETA 0:00:00"),  # all are on their way to the disk
    ],
)
def test_time_to_go_is_by_what_was_captured(captured: int, committed: int, said: str) -> None:
    state = RunState(read=1000, input_done=True, captured=captured, committed=committed)
    state.started_s = time.monotonic() - 20
    assert said in status_line(state)


def test_a_run_that_has_not_committed_yet_shows_what_it_captured() -> None:
    lane = LaneState(name="http://127.0.0.1:30000")
    lane.tokens = 40_000
    state = RunState(read=200, captured=118, in_flight=15, lanes=[lane])
    state.started_s = time.monotonic() - 10
    for said in (status_line(state), drawn(panel(state))):
        assert "118 captured for the next commit, 15 in flight" in said
        assert re.search(r"(4,000|3,99\d)(/s| tokens/s)", said)


def drawn(what: RenderableType) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
