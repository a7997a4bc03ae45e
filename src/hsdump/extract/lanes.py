"""The servers of a run. Each is a lane with budgets and luck of its own; the fleet finds one for every request.

A lane whose server died is left out, and its requests go to the others. It is taken back when a server answers at its
URL again, and only after another handshake found the same model, layers and release.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

from hsdump.engines.base import Engine, ServerAway
from hsdump.errors import HsdumpError, ServerError
from hsdump.extract.events import Events
from hsdump.extract.identity import model_digest
from hsdump.extract.pace import Courtesy, TokenRate
from hsdump.extract.state import LaneState
from hsdump.schema import EngineInfo

SPOOL_SHARE = 0.9
"""Of the server's limit, the part that this client uses, so that its own estimate is never refused."""

WAITING_SHARE = 0.5
"""Of that, what states may take that wait for the store. A disk stands still for a second now and then, as while it
flushes: the server goes on meanwhile."""

ROOM_S = 0.1
"""Between two looks at a spool that takes no more."""

EMBEDDED_BUDGET = 4 << 30
"""Bytes in flight when there is no spool."""

SICK_AFTER = 8
"""Requests that failed one after the other, no success between: the server is ill, not the samples. It is left alone
until a handshake, which captures, succeeds."""

LOOK_EVERY_S = 0.5
SETTLED_S = 0.05
"""A server publishes that it is idle in its next pass, a few milliseconds after the last request of ours. What it says
before may be of that one."""

STALLED_AFTER = 3
"""Times in a row that a server did not say how busy it is."""

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 5.0

IDENTITY = ("engine", "engine_version", "model_class", "num_layers", "vocab_size", "shape")
"""Facts that must be the same on all servers of a run, and may not change under it."""


class ServersLost(ServerError):
    """No server is left that could take a request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetLimits:
    """How much is on its way at a time, and how long a server may be away."""

    concurrency: int = 16
    """Requests in flight at each server."""

    tokens: int | None = None
    """Tokens in flight at each server; a longer sample goes alone."""

    max_rate: float | None = None
    """Tokens a second over all servers."""

    live_share: float = 0.25
    """See `Courtesy`."""

    server_wait_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What one request takes of a server."""

    num_tokens: int
    num_bytes: int
    """In the spool."""


def model_differences(expected: EngineInfo, found: EngineInfo, digest: str | None = None) -> list[str]:
    """Name the facts in which two servers differ so that their states may not be mixed. Paths may differ when the files
    are the same.

    Args:
        digest: of the expected model, when that was served earlier: other files may be in its folder now.
    """
    changed = [
        f"{name} was {getattr(expected, name)}, is {getattr(found, name)}"
        for name in IDENTITY
        if getattr(expected, name) != getattr(found, name)
    ]
    digests = [digest or model_digest(expected.model_path), model_digest(found.model_path)]
    if digests[0] != digests[1] or ("unknown" in digests and expected.model_path != found.model_path):
        changed.append(
            f"model was {expected.model_path} (digest {digests[0]}), is {found.model_path} (digest {digests[1]})"
        )
    return changed


class Lane:
    """One server."""

    def __init__(self, name: str, engine: Engine, info: EngineInfo | None, limits: FleetLimits) -> None:
        """Args:
        info: None for a server that does not answer yet.
        """
        self.engine, self.info = engine, info
        self.state = LaneState(name=name)
        self.courtesy = Courtesy(limits.live_share)
        self._limits = limits
        self.reserved = False
        self._waiting_bytes = 0
        self.empty = asyncio.Event()
        """Nothing of ours is there any more, as a look at the server wants it."""

        self.empty_since_s = -SETTLED_S
        self.away_since_s: float | None = None
        self.problem: HsdumpError | None = None
        self.failures_in_a_row = 0
        self._set_budget()

    @property
    def budget(self) -> int:
        return self.state.spool_bytes or EMBEDDED_BUDGET

    @property
    def has_waiting(self) -> bool:
        """Tell whether answered samples of it are on their way to the store."""
        return self._waiting_bytes > 0

    @property
    def settles_in_s(self) -> float:
        """Seconds until what the server says of itself is not of our last request any more, once none is there."""
        return max(self.empty_since_s + SETTLED_S - time.monotonic(), 0.0)

    def came_back(self, info: EngineInfo) -> None:
        self.info, self.problem, self.away_since_s, self.failures_in_a_row = info, None, None, 0
        self.state.status, self.state.detail = "up", ""
        self._set_budget()

    def went(self, status: str, detail: str) -> None:
        self.state.status, self.state.detail = status, detail
        if self.away_since_s is None:
            self.away_since_s = time.monotonic()

    def has_room(self, cost: Cost) -> bool:
        state, limit = self.state, self._limits.tokens
        if state.in_flight >= self._limits.concurrency or state.in_flight_bytes + cost.num_bytes > self.budget:
            return False
        if self._waiting_bytes > WAITING_SHARE * self.budget or not self._fits_spool(cost):
            return False
        return limit is None or not state.in_flight or state.in_flight_tokens + cost.num_tokens <= limit

    def _fits_spool(self, cost: Cost) -> bool:
        """Tell whether the spool takes it beside all that is on its way. Alone it is sent, whatever the spool looks
        like.
        """
        if self.info is None or not self.info.spool_max_bytes or not self.state.in_flight_bytes:
            return True
        coming = self.state.in_flight_bytes - self._waiting_bytes + cost.num_bytes
        return coming <= self.engine.spool_room * self.info.spool_max_bytes

    def begin(self, cost: Cost) -> None:
        self.state.in_flight += 1
        self.state.in_flight_tokens += cost.num_tokens
        self.state.in_flight_bytes += cost.num_bytes

    def answered(self, cost: Cost, *, well: bool) -> None:
        """The server has nothing to do with it any more; its spool holds the states, if any, until `end`."""
        self.state.in_flight -= 1
        if not self.state.in_flight:
            self.empty_since_s = time.monotonic()
            if self.courtesy.is_probing:
                self.empty.set()
        self.state.in_flight_tokens -= cost.num_tokens
        if well:
            self._waiting_bytes += cost.num_bytes
        else:
            self.state.in_flight_bytes -= cost.num_bytes

    def end(self, cost: Cost) -> None:
        self._waiting_bytes -= cost.num_bytes
        self.state.in_flight_bytes -= cost.num_bytes
        if self.away_since_s is not None and not self.has_waiting:
            self.away_since_s = time.monotonic()  # nobody could ask the new server while the old one's spool was in use

    def _set_budget(self) -> None:
        if self.info is not None and self.info.spool_max_bytes:
            self.state.spool_bytes = int(self.info.spool_max_bytes * SPOOL_SHARE)


class Fleet:
    """All lanes. Use from one event loop."""

    def __init__(
        self, lanes: Sequence[Lane], reference: EngineInfo, digest: str, limits: FleetLimits, events: Events
    ) -> None:
        """Args:
        reference: what every server must be.
        digest: of its model when the run began.
        """
        self.lanes, self.limits, self._events = lanes, limits, events
        self._reference, self._digest = reference, digest
        self._rate = TokenRate(limits.max_rate)
        self._turn = asyncio.Lock()
        self._pulse = asyncio.Event()
        self._stopped = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def largest(self) -> int:
        """Bytes that the roomiest spool takes at once."""
        return max(lane.budget for lane in self.lanes if lane.info is not None)

    def start(self) -> None:
        """Begin to look at the servers now and then."""
        for lane in self.lanes:
            self._spawn(self._watch(lane))
            if lane.info is None:
                lane.went("away", "it did not answer at the start")
                self._spawn(self._bring_back(lane))

    def stop(self) -> None:
        """Give out no lane any more."""
        self._stopped = True
        self._notify()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(lane.engine.close() for lane in self.lanes))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Take requests of a dead run off whichever server has them."""
        up = [lane for lane in self.lanes if lane.state.status == "up" and lane.info is not None]
        await asyncio.gather(*(lane.engine.abort(request_ids) for lane in up))

    async def take(self, cost: Cost, *, alone: bool = False) -> Lane | None:
        """Wait for a server with room, first come first served; None when the run is being stopped.

        Args:
            alone: nothing else may be on its way there meanwhile.

        Raises:
            ServersLost: there is none left.
        """
        async with self._turn:
            while not self._stopped:
                lane, wait_s = self._pick(cost, alone)
                if lane is not None:
                    lane.reserved = alone
                    lane.begin(cost)
                    self._rate.spend(cost.num_tokens)
                    return lane
                await self._wait(wait_s)
            return None

    def answered(self, lane: Lane, cost: Cost, seconds: float, *, well: bool) -> None:
        """Note that a request is over, one way or the other: there is room for another."""
        lane.answered(cost, well=well)
        if well:
            lane.failures_in_a_row = 0
        lane.reserved = False
        lane.courtesy.finished(seconds)
        self._notify()

    def give_back(self, lane: Lane, cost: Cost) -> None:
        """Note that the memory of states that waited is free."""
        lane.end(cost)
        self._notify()

    def succeeded(self, lane: Lane, cost: Cost) -> None:
        lane.state.captured += 1
        lane.state.tokens += cost.num_tokens

    def failed(self, lane: Lane, detail: str, *, ill: bool) -> None:
        """Note a failure; `ill` when it may be the server's."""
        lane.failures_in_a_row += ill
        if lane.state.status not in ("up", "stalled"):
            return
        if lane.engine.lost:
            lane.state.deaths += 1
        elif lane.failures_in_a_row < SICK_AFTER:
            return
        lane.went("away", detail)
        self._events("server-away", server=lane.state.name, detail=detail)
        self._spawn(self._bring_back(lane))
        self._notify()

    def _pick(self, cost: Cost, alone: bool) -> tuple[Lane | None, float]:
        """Give the lane with the fewest tokens on their way, or how long nothing can change by itself."""
        up = [lane for lane in self.lanes if lane.state.status == "up"]
        if not up:
            self._raise_if_lost()
            return None, 0.5
        wait_s = self._rate.wait_s()
        if wait_s:
            return None, wait_s
        soonest = 60.0
        fitting = []
        for lane in up:
            if lane.reserved or not lane.has_room(cost) or (alone and lane.state.in_flight):
                soonest = min(soonest, ROOM_S)  # memory comes back a moment after it was released
                continue
            lane_wait_s = lane.courtesy.wait_s(lane.state.in_flight)
            soonest = min(soonest, lane_wait_s or soonest)
            if not lane_wait_s:
                fitting.append(lane)
        return min(fitting, key=lambda lane: (lane.state.in_flight_tokens, lane.state.tokens), default=None), soonest

    def _raise_if_lost(self) -> None:
        now_s = time.monotonic()
        for lane in self.lanes:
            away_s = now_s - (lane.away_since_s or now_s)
            if lane.state.status != "refused" and (lane.has_waiting or away_s <= self.limits.server_wait_s):
                return
        refused = next((lane.problem for lane in self.lanes if lane.state.status == "refused"), None)
        if refused is not None:
            raise refused
        what = "; ".join(f"{lane.state.name}: {_reason(lane)}" for lane in self.lanes)
        raise ServersLost(
            f"{what}; away for more than {self.limits.server_wait_s:.0f} s",
            "start the server again and run the same extract command: it goes on where it stopped",
        )

    async def _bring_back(self, lane: Lane) -> None:
        """Shake hands again and again, until the same server answers."""
        pause_s = FIRST_PAUSE_S
        while True:
            while lane.state.in_flight or lane.has_waiting:
                await self._wait(LOOK_EVERY_S)
            try:
                if self._take_back(lane, await lane.engine.reconnect()):
                    return
            except HsdumpError as error:
                lane.problem = error
            except OSError as error:  # files of a spool or a model that come and go just now
                lane.problem = ServerError(str(error), "it is tried again")
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)

    def _take_back(self, lane: Lane, info: EngineInfo) -> bool:
        changed = model_differences(self._reference, info, self._digest)
        if not changed:
            lane.came_back(info)
            self._events("server-back", server=lane.state.name)
            self._notify()
            return True
        if lane.state.status != "refused":
            lane.problem = ServerError(
                f"another server answers at {lane.state.name} now: {'; '.join(changed)}",
                "start the server as it was, or extract into a new store",
            )
            lane.went("refused", lane.problem.what)
            self._events("server-refused", server=lane.state.name, detail=lane.problem.what)
            self._notify()
        return False

    async def _watch(self, lane: Lane) -> None:
        """Ask a server now and then how busy it is."""
        silent = 0
        while True:
            await self._until_next_look(lane)
            if lane.state.status not in ("up", "stalled"):
                continue
            ours = max(lane.state.in_flight, int(lane.settles_in_s > 0))
            try:
                load = await lane.engine.load()
            except ServerAway as error:
                silent += 1
                if lane.engine.lost:
                    self.failed(lane, error.detail, ill=False)
                elif silent == STALLED_AFTER:
                    lane.went("stalled", error.detail)
                    self._events("server-away", server=lane.state.name, detail=f"stalled: {error.detail}")
                continue
            silent = 0
            if lane.state.status == "stalled" and lane.info is not None:
                lane.came_back(lane.info)
                self._events("server-back", server=lane.state.name)
            if load is None:
                lane.courtesy.see_nothing()
            else:
                lane.courtesy.see(load, max(ours, lane.state.in_flight))
                lane.state.others, lane.state.stepping_back = lane.courtesy.others, lane.courtesy.is_live
            self._notify()

    async def _until_next_look(self, lane: Lane) -> None:
        """Wait for the next time, or for the moment that nothing of ours is there: the server idles until then."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(lane.empty.wait(), LOOK_EVERY_S)
        lane.empty.clear()
        if lane.courtesy.is_probing and not lane.state.in_flight:
            await asyncio.sleep(lane.settles_in_s)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _notify(self) -> None:
        self._pulse.set()
        self._pulse = asyncio.Event()

    async def _wait(self, seconds: float) -> None:
        """Sleep until something changed, at most so long."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._pulse.wait(), seconds)


def _reason(lane: Lane) -> str:
    return lane.problem.what if lane.problem is not None else lane.state.detail
