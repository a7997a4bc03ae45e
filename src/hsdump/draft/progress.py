"""What a training says while it goes on: a live panel or lines, a CSV file, and TensorBoard where it is asked for."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table

from hsdump.errors import UsageError

CSV = "progress.csv"
LINE_EVERY_S = 15.0


class Progress:
    """Shows and writes figures of steps. Of all ranks only the first one has it shown."""

    def __init__(self, folder: Path, *, steps: int, total: int, after: int, quiet: bool, tensorboard: bool) -> None:
        """Args:
        steps: of the training-time test.
        total: optimizer steps in all.
        after: the step behind which this run begins; later rows of an earlier run are dropped, since they come again.
        """
        self._total, self._quiet, self._ttt = total, quiet, steps
        self._names = ["step", "epoch", "tokens", "loss", "lr", "grad_norm", "tokens_per_s", "wait_share", "gpu_gib"]
        self._names += [f"loss_{step}" for step in range(steps)] + [f"right_{step}" for step in range(steps)]
        self._names += ["val_length", *(f"val_right_{step}" for step in range(steps))]
        self._file = _open_csv(folder / CSV, self._names, after)
        self._board: Any = _tensorboard(folder) if tensorboard else None
        self._console = Console(stderr=True)
        self._live: Live | None = None
        if self._console.is_terminal and not quiet:
            self._live = Live(console=self._console, refresh_per_second=2, transient=True)
            self._live.start()
        self._next_line_s = time.monotonic() + LINE_EVERY_S
        self._began_s, self._after = time.monotonic(), after
        self.validation: dict[str, Any] = {}

    def row(self, values: dict[str, Any]) -> None:
        """Write one row: figures of a step, or of a validation."""
        csv.DictWriter(self._file, self._names).writerow(values)
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, float):
                    self._board.add_scalar(name, value, values["step"])
        if "val_length" in values:
            self.validation = values
            self._say(f"step {values['step']}: validation acceptance length {values['val_length']:.3f}")
        elif self._live is not None:
            self._live.update(self._panel(values))
        elif time.monotonic() > self._next_line_s:
            self._next_line_s = time.monotonic() + LINE_EVERY_S
            self._say(self._line(values))

    def close(self) -> None:
        """Take the panel away."""
        if self._live is not None:
            self._live.stop()
        self._file.close()
        if self._board is not None:
            self._board.close()

    def _say(self, line: str) -> None:
        if not self._quiet:
            self._console.print(f"hsdump: {line}", highlight=False, markup=False, soft_wrap=True)
            sys.stderr.flush()

    def _eta(self, step: int) -> timedelta:
        seconds = time.monotonic() - self._began_s
        return timedelta(seconds=round(seconds / max(step - self._after, 1) * (self._total - step)))

    def _line(self, values: dict[str, Any]) -> str:
        return (
            f"step {values['step']} of {self._total}, loss {values['loss']:.3f}, first guess {values['right_0']:.1%}, "
            f"{values['tokens_per_s']:,.0f} tokens/s, ETA {self._eta(values['step'])}"
        )

    def _panel(self, values: dict[str, Any]) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_row(
            "step", f"{values['step']} of {self._total}, epoch {values['epoch']}, ETA {self._eta(values['step'])}"
        )
        table.add_row(
            "tokens/s", f"{values['tokens_per_s']:,.0f}, {values['wait_share']:.1%} of the time waiting for data"
        )
        table.add_row("loss", " ".join(f"{values[f'loss_{step}']:.3f}" for step in range(self._ttt)))
        table.add_row("right", " ".join(f"{values[f'right_{step}']:.1%}" for step in range(self._ttt)))
        if self.validation:
            table.add_row("validation", f"acceptance length {self.validation['val_length']:.3f}")
        if values["gpu_gib"]:
            table.add_row("GPU memory", f"{values['gpu_gib']:.1f} GiB")
        return table


def step_rows(lost: Sequence[float], right: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
    """Name the means of each step of the training-time test."""
    rows = {f"loss_{step}": loss / max(count, 1.0) for step, (loss, count) in enumerate(zip(lost, counts, strict=True))}
    return rows | {
        f"right_{step}": hit / max(count, 1.0) for step, (hit, count) in enumerate(zip(right, counts, strict=True))
    }


def gpu_gib(device: torch.device) -> float:
    """Most memory that was used so far; 0 without a GPU."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def _open_csv(path: Path, names: list[str], after: int) -> Any:
    kept: list[dict[str, str]] = []
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            kept = [
                row for row in csv.DictReader(file) if (row.get("step") or "").isdigit() and int(row["step"]) <= after
            ]
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(kept)
    partial.replace(path)
    return path.open("a", encoding="utf-8", newline="")


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError(
            f"--tensorboard needs a package that is missing ({error})", "pip install tensorboard"
        ) from error
    return SummaryWriter(str(folder / "tensorboard"))
