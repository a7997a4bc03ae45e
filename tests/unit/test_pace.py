"""Rates and stepping back, by a clock of the test's own."""

from __future__ import annotations

import pytest

from hsdump.engines.base import ServerLoad
from hsdump.extract.pace import FIRST_PROBE_S, LIVE_HOLD_S, PROBE_EVERY_S, QUEUE_PATIENCE_S, Courtesy, TokenRate


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_rate_is_kept_over_time_and_after_a_pause() -> None:
    clock = Clock()
    rate, sent = TokenRate(100.0, clock), 0
    for _ in range(200):  # 20 s in steps of 0.1 s
        if rate.wait_s() == 0:
            rate.spend(37)
            sent += 37
        clock.now_s += 0.1
    assert sent == pytest.approx(2000, abs=137)  # one burst of a second, one overdraft
    clock.now_s += 3600
    assert rate.wait_s() == 0
    rate.spend(100)
    rate.spend(100)
    assert rate.wait_s() == pytest.approx(1.0)  # an hour's pause was worth a second


def test_without_a_rate_nothing_waits() -> None:
    rate = TokenRate(None)
    rate.spend(10**9)
    assert rate.wait_s() == 0


def test_alone_on_a_server_nothing_waits() -> None:
    courtesy = Courtesy(0.25, Clock())
    courtesy.see(ServerLoad(running=0, waiting=7), ours=16)
    assert not courtesy.is_live
    assert courtesy.wait_s(in_flight=15) == 0


def test_beside_others_one_at_a_time_and_a_quarter_of_the_time() -> None:
    clock = Clock()
    courtesy = Courtesy(0.25, clock)
    courtesy.see(ServerLoad(running=2, waiting=0), ours=0)
    assert courtesy.others == 2
    assert courtesy.wait_s(in_flight=1) > 0
    courtesy.finished(0.5)
    assert courtesy.wait_s(in_flight=0) == pytest.approx(1.5)  # 0.5 s of 2.0 s
    clock.now_s += 1.5
    assert courtesy.wait_s(in_flight=0) == 0


def test_others_that_wait_have_the_way_but_not_for_ever() -> None:
    clock = Clock()
    courtesy = Courtesy(0.5, clock)
    courtesy.see(ServerLoad(running=0, waiting=3), ours=0)
    assert courtesy.wait_s(in_flight=0) == pytest.approx(QUEUE_PATIENCE_S)
    clock.now_s += QUEUE_PATIENCE_S
    courtesy.see(ServerLoad(running=0, waiting=3), ours=0)
    assert courtesy.wait_s(in_flight=0) == 0
    assert courtesy.wait_s(in_flight=0) == pytest.approx(QUEUE_PATIENCE_S)


def test_when_the_others_are_gone_so_is_the_courtesy() -> None:
    clock = Clock()
    courtesy = Courtesy(0.25, clock)
    courtesy.see(ServerLoad(running=1, waiting=0), ours=0)
    clock.now_s += LIVE_HOLD_S + 0.1
    courtesy.see(ServerLoad(running=0, waiting=0), ours=0)
    assert courtesy.wait_s(in_flight=9) == 0


def test_a_suspicion_is_looked_into_when_ours_are_through_and_not_again_soon() -> None:
    """Older releases count finished requests of ours as running."""
    clock = Clock()
    courtesy = Courtesy(0.25, clock)
    courtesy.see(ServerLoad(running=30, waiting=0), ours=16)
    assert not courtesy.is_live
    assert courtesy.wait_s(in_flight=16) > 0
    assert courtesy.wait_s(in_flight=0) > 0
    courtesy.see(ServerLoad(running=0, waiting=0), ours=0)
    assert courtesy.wait_s(in_flight=0) == 0
    courtesy.see(ServerLoad(running=30, waiting=0), ours=16)
    assert courtesy.wait_s(in_flight=15) == 0
    clock.now_s += PROBE_EVERY_S
    courtesy.see(ServerLoad(running=30, waiting=0), ours=16)
    assert courtesy.wait_s(in_flight=15) > 0


def seconds_until_looked_into(courtesy: Courtesy, clock: Clock) -> float:
    """Let the server look busy all the time, ours included, until the next is held back."""
    began_s = clock.now_s
    while True:
        courtesy.see(ServerLoad(running=30, waiting=0), ours=16)
        if courtesy.wait_s(in_flight=16):
            return clock.now_s - began_s
        clock.now_s += 0.5


def test_false_suspicions_become_rare_and_a_true_one_makes_them_quick_again() -> None:
    """Somebody who comes just after a look is met within seconds; a release that always looks busy costs little."""
    clock = Clock()
    courtesy = Courtesy(0.25, clock)
    courtesy.see(ServerLoad(running=0, waiting=0), ours=0)
    waited = []
    for _ in range(7):
        waited.append(seconds_until_looked_into(courtesy, clock))
        courtesy.see(ServerLoad(running=0, waiting=0), ours=0)
    assert waited == [FIRST_PROBE_S, 4.0, 8.0, 16.0, PROBE_EVERY_S, PROBE_EVERY_S, PROBE_EVERY_S]
    courtesy.see(ServerLoad(running=2, waiting=0), ours=0)
    clock.now_s += LIVE_HOLD_S
    courtesy.see(ServerLoad(running=0, waiting=0), ours=0)
    assert seconds_until_looked_into(courtesy, clock) == FIRST_PROBE_S


def test_a_share_of_one_never_steps_back() -> None:
    courtesy = Courtesy(1.0, Clock())
    courtesy.see(ServerLoad(running=5, waiting=5), ours=0)
    assert courtesy.wait_s(in_flight=3) == 0


def test_who_takes_no_notice_of_others_is_not_kept_waiting_for_a_look() -> None:
    clock = Clock()
    courtesy = Courtesy(1.0, clock)
    courtesy.see(ServerLoad(running=3, waiting=0), 1)
    assert not courtesy.is_probing
    assert courtesy.wait_s(1) == 0
