"""What `hsdump generate` was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hsdump.errors import UsageError
from hsdump.prompts import PromptOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the target chooses tokens. The default is the model's own distribution, unchanged."""

    temperature: float = 1.0
    """0 is greedy."""

    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""

    max_new_tokens: int = 2048
    """Of one answer. What is longer is cut there, and counted."""

    seed: int | None = None
    """Each answer gets a seed of its own, made from this. Servers use it under `--enable-deterministic-inference`."""

    def __post_init__(self) -> None:
        """Raises:
        UsageError: a value that every server refuses.
        """
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p {self.top_p} is outside 0 to 1", "use 1 for all tokens, or 0.95, say")
        if self.top_k == 0:
            raise UsageError("--top-k 0 leaves no token", "use -1 for all tokens, or a number above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """Everything of one run."""

    inputs: tuple[Path, ...]
    out: Path
    """The samples file. The answers are kept beside it, in `OUT.answers`."""

    sampling: Sampling = field(default_factory=Sampling)
    num_answers: int = 1
    """Conversations made of each question."""

    replies: Literal["all", "last"] = "all"
    """Which replies of a row the target gives anew."""

    cut: Literal["keep", "drop"] = "keep"
    """Answers that reached `max_new_tokens`: every token of them is the target's own, but they have no end."""

    concurrency: int = 32
    attempts: int = 5
    retry_failed: bool = False
    server_wait_s: float = 120.0
    prompts: PromptOptions = field(default_factory=PromptOptions)

    def __post_init__(self) -> None:
        """Raises:
        UsageError: settings that contradict each other.
        """
        if self.num_answers > 1 and self.sampling.temperature == 0:
            raise UsageError(
                f"--n {self.num_answers} with --temperature 0 gives the same answer {self.num_answers} times",
                "raise --temperature, or leave --n out",
            )

    @property
    def answers_path(self) -> Path:
        return self.out.with_name(self.out.name + ".answers")

    def identity(self) -> dict[str, Any]:
        """Give the settings under which two answers to one question may stand in one file."""
        sampling = self.sampling
        names = ("temperature", "top_p", "top_k", "max_new_tokens", "seed")
        return {name: getattr(sampling, name) for name in names}
