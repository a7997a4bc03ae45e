"""The keeper of a run whose states are written by collectors: it only knows what their partitions have."""

from __future__ import annotations

from collections.abc import Sequence

from hsdump.engines.base import CapturedSample
from hsdump.engines.collector import CollectorEngine
from hsdump.extract.events import Events
from hsdump.extract.plan import ExtractPlan
from hsdump.extract.state import FailedSample, RunState
from hsdump.keys import KeySet
from hsdump.prompts import Skip
from hsdump.samples import TokenSample
from hsdump.store.index import RequestRow


class Ledger:
    """Stands where `Keeper` stands, without a store. What a collector committed is committed; a sample that two
    partitions have, because a collector died after its commit, is taken once when they are merged.
    """

    def __init__(self, engines: Sequence[CollectorEngine], plan: ExtractPlan, state: RunState, events: Events) -> None:
        self._engines, self._plan, self._state, self._events = engines, plan, state, events
        self._committed = KeySet()
        self._failed: frozenset[str] = frozenset()

    async def open(self) -> list[RequestRow]:
        begun = [engine.begun for engine in self._engines if engine.begun is not None]
        for part in begun:
            self._committed.unpack(part.committed)
        self._failed = frozenset(key for part in begun for key in part.failed if key not in self._committed)
        return []

    def committed(self, key: str) -> bool:
        return key in self._committed

    def is_safe(self, key: str) -> bool:
        return key in self._committed

    def failed_before(self, key: str) -> bool:
        return key in self._failed

    def committed_keys(self) -> KeySet:
        return self._committed

    def failed_keys(self) -> frozenset[str]:
        return self._failed

    def note(self, sample: TokenSample, state: str, request_id: str = "", server: str = "") -> None:
        """The partitions' own indexes say where a sample is."""

    def unnote(self, sample: TokenSample) -> None:
        """As `note`."""

    async def keep(self, sample: TokenSample, captured: CapturedSample, attempts: int) -> None:  # noqa: ARG002 - no states
        self._committed.add(sample.key)
        num_tokens = len(sample.input_ids)
        self._state.committed += 1
        self._state.tokens += num_tokens
        self._state.state_bytes += num_tokens * self._plan.shape.bytes_per_token
        self._events("committed", samples=1, tokens=num_tokens, keys=[sample.key])

    async def fail(self, sample: TokenSample, reason: str, detail: str, *, attempts: int) -> None:
        self._state.add_failure(FailedSample(key=sample.key, source=sample.source, reason=reason, detail=detail))
        self._events("failed", key=sample.key, source=sample.source, reason=reason, detail=detail, attempts=attempts)

    async def skip(self, row: Skip) -> None:
        self._state.skipped[row.reason] += 1
        self._state.lost_rows += row.lost
        self._events("skipped", source=row.source, reason=row.reason, detail=row.detail)

    async def tick(self) -> None:
        """Nothing waits here."""

    async def close(self) -> None:
        """The collectors commit when their engines are closed."""

    def shut_down(self) -> None:
        """No thread to end."""
