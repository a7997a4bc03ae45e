"""Runs `speculators.train` of the speculators library as it is, and notes what it says of each step.

    python -m benchmarks.train.their_trainer OUT.json --config CONFIG.yaml

Its own loop, loader, model, loss and optimizer, started as its command line starts them. Left out is what does not
belong to a rate: validation and checkpoints at an epoch's end. Written behind every step, so that a run that is cut
has left what it measured. Without an accelerator, which its trainer wants, it runs on the CPU, to try the way there.
"""

from __future__ import annotations

import json
import logging
import runpy
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


class Steps(logging.Handler):
    """Collects the figures that the trainer logs, one record a step."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.out = out
        self.steps: list[dict[str, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        said: Any = record.msg  # a dict, in this library
        profile = said.get("profile") if isinstance(said, dict) else None
        if profile is None:
            return
        numbers = {name: float(profile[name]) for name in ("tokens_per_s", "step_ms", "fetch_frac", "fwd_ms", "bwd_ms")}
        self.steps.append({**numbers, "at_s": time.perf_counter(), "loss": float(said["train"].get("loss", 0.0))})
        self.write()

    def write(self) -> None:
        cuda = torch.cuda.is_available()
        found = {
            "speculators": version("speculators"),
            "steps": self.steps,
            "peak_gpu_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
            "reserved_gpu_gib": torch.cuda.max_memory_reserved() / 2**30 if cuda else 0.0,
        }
        partial = self.out.with_suffix(".partial")
        partial.write_text(json.dumps(found) + "\n", encoding="utf-8")
        partial.replace(self.out)


def leave_out_the_rest(trainer: Any) -> None:
    """Take validation and checkpoints away; without an accelerator, put everything on the CPU."""
    trainer.Trainer.val_epoch = lambda *_args: None
    trainer.Trainer.maybe_save_checkpoint = lambda *_args, **_named: None
    trainer.Trainer.maybe_update_best = lambda *_args: None
    if not torch.cuda.is_available():
        trainer.get_local_rank = lambda: "cpu"
        torch.accelerator.synchronize = lambda *_args: None


def main() -> None:
    steps = Steps(Path(sys.argv[1]))
    sys.argv = ["speculators.train", *sys.argv[2:]]
    import speculators.train.logger as theirs
    from speculators.train import trainer

    leave_out_the_rest(trainer)
    configure = theirs.dictConfig

    def keeping(settings: Any) -> None:
        """Its logging is set up anew at the start, which drops handlers that it does not know."""
        configure(settings)
        logging.getLogger("speculators.metrics").addHandler(steps)

    theirs.dictConfig = keeping
    runpy.run_module("speculators.train", run_name="__main__")
    steps.write()


if __name__ == "__main__":
    main()
