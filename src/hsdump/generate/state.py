"""What one run has done so far: the numbers behind the display, the report and the exit code."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hsdump.errors import HsdumpError
from hsdump.prompts import Skip

EXIT_ALL_ANSWERED = 0
EXIT_SOME_FAILED = 3
EXIT_STOPPED_EARLY = 4

_EXAMPLES = 5
"""Skips and failures named in full for each reason; all are counted."""


@dataclass(kw_only=True, slots=True)
class GenerateState:
    """Counters of one run. Changed by the driver only; the display just reads them."""

    settings: dict[str, Any] = field(default_factory=dict)
    started_s: float = field(default_factory=time.monotonic)
    rows: int = 0
    rows_expected: int | None = None
    """Rows of the input, where that is cheap to know."""

    questions: int = 0
    """Of the rows, those that ask something, each once."""

    per_question: int = 1
    """Conversations made of each."""

    done: int = 0
    """Conversations of which nothing is left to ask, in this run or before."""

    already: int = 0
    """Of those, finished by an earlier run."""

    earlier_failures: int = 0
    """Conversations that failed in an earlier run and were not asked for again."""

    answers: int = 0
    """That came in this run."""

    answer_tokens: int = 0
    prompt_tokens: int = 0
    in_flight: int = 0
    retries: int = 0
    stopped: str | None = None
    """Why the run ended before the input did."""

    error: HsdumpError | None = None
    finish: Counter[str] = field(default_factory=Counter)
    """Answers of this run by finish reason."""

    failed: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    lost_rows: int = 0
    """Of the skipped, those that no rule explains: the input is damaged or not understood."""

    notes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    samples: Counter[str] = field(default_factory=Counter)
    """What the samples file holds: `samples`, `tokens`, `loss_tokens`, `duplicate`, `cut-dropped`."""

    ended_s: float | None = None
    """When the run's report was written: what is printed then says the same."""

    @property
    def seconds(self) -> float:
        now_s = time.monotonic() if self.ended_s is None else self.ended_s
        return max(now_s - self.started_s, 1e-9)

    @property
    def closed(self) -> int:
        """Conversations that this run will not touch again."""
        return self.done + self.failed.total() + self.earlier_failures

    @property
    def total(self) -> int | None:
        """Conversations in all, as far as the size of the input is known."""
        if self.rows_expected is None:
            return None
        return max(self.rows_expected - self.skipped.total(), self.questions) * self.per_question

    def skip(self, item: Skip) -> None:
        """Count a row that asks nothing."""
        self.skipped[item.reason] += 1
        self.lost_rows += item.lost
        self._example(item.reason, item.source, item.detail)

    def fail(self, reason: str, source: str, detail: str) -> None:
        """Count a conversation that has no answer."""
        self.failed[reason] += 1
        self._example(reason, source, detail)

    def _example(self, reason: str, source: str, detail: str) -> None:
        examples = self.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            examples.append({"source": source, "detail": detail})

    def exit_code(self) -> int:
        """4 stopped early, 3 some conversations failed or rows were lost, 0 all answered."""
        if self.stopped:
            return EXIT_STOPPED_EARLY
        return EXIT_SOME_FAILED if self.failed or self.earlier_failures or self.lost_rows else EXIT_ALL_ANSWERED

    def report(self) -> dict[str, Any]:
        """Give the run's result for `--json` and for OUT.report.json."""
        return {
            "exit_code": self.exit_code(),
            "stopped": self.stopped,
            "fix": self.error.fix if self.error else None,
            "rows": self.rows,
            "questions": self.questions,
            "conversations_done": self.done,
            "already_answered": self.already,
            "failed_earlier": self.earlier_failures,
            "answers": self.answers,
            "answer_tokens": self.answer_tokens,
            "prompt_tokens": self.prompt_tokens,
            "finish": dict(sorted(self.finish.items())),
            "failed": dict(sorted(self.failed.items())),
            "skipped": dict(sorted(self.skipped.items())),
            "lost_rows": self.lost_rows,
            "retries": self.retries,
            "samples": {name: self.samples[name] for name in ("samples", "tokens", "loss_tokens")},
            "left_out": {name: self.samples[name] for name in ("duplicate", "cut-dropped")},
            "notes": dict(sorted((+self.notes).items())),
            "examples": self.examples,
            "seconds": round(self.seconds, 3),
            "answer_tokens_per_s": round(self.answer_tokens / self.seconds, 1),
            "settings": self.settings,
        }
