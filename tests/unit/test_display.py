"""What a person reads while an extraction goes on."""

from __future__ import annotations

import time

import pytest

from hsdump.extract.display import status_line
from hsdump.extract.state import RunState


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
