"""What one run has done so far: the numbers behind the display, the report and the exit code."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, field

from hsdump.errors import HsdumpError
from hsdump.schema import EngineInfo

EXIT_ALL_COMMITTED = 0
EXIT_SOME_FAILED = 3
EXIT_STOPPED_EARLY = 4


LISTED_FAILURES = 100
"""Failures that a report names one by one; the index has all of them (`hsdump store ls --failed`)."""


@dataclass(kw_only=True, slots=True)
class LaneState:
    """One server as the run sees it."""

    name: str
    status: str = "up"
    """`up`, `away`, `stalled`, `refused` (another server answers at its URL)."""

    detail: str = ""
    in_flight: int = 0
    in_flight_tokens: int = 0
    in_flight_bytes: int = 0
    spool_bytes: int | None = None
    """Of the server's spool, what this run may fill."""

    captured: int = 0
    tokens: int = 0
    """Of captured samples."""

    others: int = 0
    """Requests of others there, when it was last asked."""

    stepping_back: bool = False
    """Live traffic is there, and has the way."""

    deaths: int = 0


@dataclass(kw_only=True, slots=True)
class FailedSample:
    """One line of the list at the end."""

    key: str
    source: str
    reason: str
    detail: str


@dataclass(kw_only=True, slots=True)
class RunState:
    """Counters of one run. Changed by the driver only; the display just reads them."""

    started_s: float = field(default_factory=time.monotonic)

    read: int = 0
    """Samples that the input gave, those already committed included."""

    already: int = 0
    """Of those, committed by an earlier run."""

    earlier_failures: int = 0
    """Of those, failed in an earlier run and not asked for again."""

    captured: int = 0
    committed: int = 0
    tokens: int = 0
    """Of committed samples."""

    state_bytes: int = 0
    """States of committed samples, as they left the model."""

    in_flight: int = 0
    in_flight_bytes: int = 0
    in_flight_tokens: int = 0
    waiting: int = 0
    """Answered, and not in the store yet."""

    retries: int = 0
    server_deaths: int = 0
    """Requests whose server died under them. They cost their samples no try."""

    not_asked: int = 0
    """Samples that `--only` left out."""

    unknown_ids: list[str] = field(default_factory=list)
    """Of `--only`, what the input did not have."""

    aborted: int = 0
    """Requests of a dead run that were taken off the servers at the start."""

    lanes: list[LaneState] = field(default_factory=list)
    failures: list[FailedSample] = field(default_factory=list)
    """The first ones of this run."""

    partitions: list[str] = field(default_factory=list)
    """Where collectors wrote, each on its own host."""

    disk_free: int | None = None
    is_open: bool = False
    """The store is open: from here on, this run may speak for it."""

    input_done: bool = False
    engine: EngineInfo | None = None
    """What the handshake found."""

    rows_expected: int | None = None
    """Rows of the input, where that is cheap to know."""

    stopped: str | None = None
    """Why the run ended before the input did."""

    error: HsdumpError | None = None
    """What ended it, when it was not the user."""

    failed: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    """Rows that gave no sample, by reason."""

    lost_rows: int = 0
    """Of those, the ones that no rule explains: the input is damaged or not understood."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def captured_tokens(self) -> int:
        """Of samples that were handed over, committed or not."""
        return sum(lane.tokens for lane in self.lanes)

    @property
    def finished(self) -> int:
        """Samples and rows of which nothing is left to do in this run."""
        done = self.already + self.earlier_failures + self.committed + self.not_asked
        return done + self.failed.total() + self.skipped.total()

    @property
    def to_do(self) -> int | None:
        """What is left, when the size of the input is known."""
        total = self.read + self.skipped.total() if self.input_done else self.rows_expected
        return None if total is None else max(total - self.finished, 0)

    @property
    def is_empty(self) -> bool:
        """Not one row gave a sample: whatever the rules say, nobody wanted that."""
        return self.input_done and self.read == 0

    def add_failure(self, failure: FailedSample) -> None:
        self.failed[failure.reason] += 1
        if len(self.failures) < LISTED_FAILURES:
            self.failures.append(failure)

    def exit_code(self) -> int:
        """4 stopped early, 3 some samples failed or rows were lost, 0 all committed."""
        if self.stopped:
            return EXIT_STOPPED_EARLY
        incomplete = self.failed or self.earlier_failures or self.lost_rows or self.unknown_ids or self.is_empty
        return EXIT_SOME_FAILED if incomplete else EXIT_ALL_COMMITTED

    def report(self) -> dict[str, object]:
        """Give the run's result for `--json`."""
        return {
            "exit_code": self.exit_code(),
            "stopped": self.stopped,
            "fix": self.error.fix if self.error else None,
            "engine": asdict(self.engine) if self.engine else None,
            "samples_read": self.read,
            "already_committed": self.already,
            "failed_earlier": self.earlier_failures,
            "committed": self.committed,
            "failed": dict(self.failed),
            "failures": [asdict(failure) for failure in self.failures],
            "skipped": dict(self.skipped),
            "lost_rows": self.lost_rows,
            "not_asked": self.not_asked,
            "unknown_ids": self.unknown_ids,
            "retries": self.retries,
            "server_deaths": self.server_deaths,
            "aborted_leftovers": self.aborted,
            "partitions": self.partitions,
            "servers": [asdict(lane) for lane in self.lanes],
            "tokens": self.tokens,
            "state_bytes": self.state_bytes,
            "seconds": round(self.seconds, 3),
            "tokens_per_s": round(self.tokens / max(self.seconds, 1e-9), 1),
        }
