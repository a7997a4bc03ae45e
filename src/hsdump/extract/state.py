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
    retries: int = 0
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
    def finished(self) -> int:
        """Samples and rows of which nothing is left to do in this run."""
        return self.already + self.earlier_failures + self.committed + self.failed.total() + self.skipped.total()

    @property
    def to_do(self) -> int | None:
        """What is left, when the size of the input is known."""
        total = self.read + self.skipped.total() if self.input_done else self.rows_expected
        return None if total is None else max(total - self.finished, 0)

    def exit_code(self) -> int:
        """4 stopped early, 3 some samples failed or rows were lost, 0 all committed."""
        if self.stopped:
            return EXIT_STOPPED_EARLY
        incomplete = self.failed or self.earlier_failures or self.lost_rows
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
            "skipped": dict(self.skipped),
            "lost_rows": self.lost_rows,
            "retries": self.retries,
            "tokens": self.tokens,
            "state_bytes": self.state_bytes,
            "seconds": round(self.seconds, 3),
            "tokens_per_s": round(self.tokens / max(self.seconds, 1e-9), 1),
        }
