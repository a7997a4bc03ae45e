"""The first reply of a server is looked at before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from hsdump.engines.handshake import HELLO_TOKENS, Offer, _check_widths
from hsdump.errors import ServerError
from tests.unit.test_driver import INFO


@pytest.mark.parametrize("widths", [[(4, 8)] * 3, [(4, 8)] * 3 + [(4, 16)], [(3, 8)] * 4])
def test_states_of_another_number_or_width_are_refused_with_both(widths: list[tuple[int, ...]]) -> None:
    offer = Offer(Path("/dev/shm/x"), 1, INFO, None, None)
    with pytest.raises(ServerError, match=r"announces 4 states of \[4, 8\] for 4 tokens and hands over"):
        _check_widths("http://h:1", offer, widths)
    _check_widths("http://h:1", offer, [(HELLO_TOKENS, 8)] * 4)
