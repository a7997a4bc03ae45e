"""Being polite: a token rate that is not exceeded, and stepping back while others use the server.

Both go by the monotonic clock; a wall clock that jumps changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hsdump.engines.base import ServerLoad

BURST_S = 1.0
"""Unused allowance is kept for so long; more would let a rate be broken after every pause."""

LIVE_HOLD_S = 3.0
"""Others count as present so long after they were last seen: short requests come and go between two looks."""

FIRST_PROBE_S = 2.0
PROBE_EVERY_S = 30.0
"""SGLang before 0.5.23 counts finished requests of ours as running until it decodes again (52 beside 2 others).
So a look counts only while none of ours is there. A suspicion is looked into after `FIRST_PROBE_S`; each one that finds
nobody doubles the time to the next, up to `PROBE_EVERY_S`, and somebody found begins again."""

QUEUE_PATIENCE_S = 10.0
"""While others wait in the server's queue nothing is sent, but not for ever: one request each such time."""


class TokenRate:
    """At most so many tokens a second, over all servers of a run; a sample may overdraw, and the next ones wait."""

    def __init__(self, tokens_per_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = tokens_per_s, clock
        self._allowance, self._at_s = (tokens_per_s or 0.0) * BURST_S, clock()

    def wait_s(self) -> float:
        """Give the seconds until the next sample may be sent, 0 for now."""
        if self._rate is None:
            return 0.0
        now_s = self._clock()
        self._allowance = min(self._allowance + (now_s - self._at_s) * self._rate, self._rate * BURST_S)
        self._at_s = now_s
        return max(-self._allowance / self._rate, 0.0)

    def spend(self, num_tokens: int) -> None:
        self._allowance -= num_tokens


class Courtesy:
    """What one server has left for us.

    While others are there, one request of ours is on its way at a time, and after it took t seconds none follows for
    t x (1/share - 1): whatever a sample costs this server, it costs it at most `share` of the time. That needs no
    knowledge of the server's speed.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Args:
        share: of the server's time, in 0..1; 1 never steps back.
        """
        self._share, self._clock = share, clock
        self._live_until_s = self._queued_since_s = 0.0
        self._not_before_s = 0.0
        self._probing = False
        self._next_probe_s = 0.0
        self._probe_every_s = FIRST_PROBE_S
        self.others = 0
        """Requests of others when the server was last asked while none of ours was there."""

    @property
    def is_probing(self) -> bool:
        """Nothing of ours is sent until the server was looked at without."""
        return self._share < 1 and self._probing

    @property
    def is_live(self) -> bool:
        return self._share < 1 and self._clock() < self._live_until_s

    def see(self, load: ServerLoad, ours: int) -> None:
        """Take note of what the server said, `ours` being our own requests there."""
        now_s = self._clock()
        queued = max(load.waiting - ours, 0)
        if not queued:
            self._queued_since_s = 0.0
        elif not self._queued_since_s:
            self._queued_since_s = now_s
        if ours == 0:
            self.others = load.running + load.waiting
            if self.others:
                self._live_until_s = now_s + LIVE_HOLD_S
                self._probe_every_s = FIRST_PROBE_S
            elif self._probing:
                self._probe_every_s = min(2 * self._probe_every_s, PROBE_EVERY_S)
            self._probing = False
            self._next_probe_s = now_s + self._probe_every_s
        elif (load.running or queued) and not self.is_live and now_s >= self._next_probe_s:
            self._probing = True  # until ours are through, so that the next look shows who else is there

    def see_nothing(self) -> None:
        """Take note that the server does not say how busy it is: nothing is waited for."""
        self._probing = False

    def finished(self, seconds: float) -> None:
        """Take note that a request of ours took so long."""
        if self.is_live:
            self._not_before_s = self._clock() + seconds * (1 / self._share - 1)

    def wait_s(self, in_flight: int) -> float:
        """Give the seconds until another request may be sent, 0 for now."""
        if self.is_probing:
            return LIVE_HOLD_S
        if not self.is_live:
            return 0.0
        now_s = self._clock()
        if in_flight:
            return LIVE_HOLD_S
        wait_s = max(self._not_before_s - now_s, 0.0)
        if self._queued_since_s:
            wait_s = max(wait_s, self._queued_since_s + QUEUE_PATIENCE_S - now_s)
            if wait_s <= 0:
                self._queued_since_s = now_s  # one now, the next after the same patience
        return max(wait_s, 0.0)
