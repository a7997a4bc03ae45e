"""Data files of the field through the reader: how many rows each gives, against what is known of it, as a table.

    python -m tests.prompts.data_table FOLDER        (or HSDUMP_REAL_FOLDER)

FOLDER holds `data/` and a README.md whose table says the number of records of each file. Exits 1 when a count differs.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

from hsdump.prompts import Notes, PromptOptions, Renderer, Skip, read_samples
from hsdump.prompts.inputs import read_rows
from hsdump.prompts.options import RowRefused
from hsdump.prompts.questions import parse_question

from .real import FOLDER_VARIABLE, model_for
from .templates import CHATML

LINE = re.compile(r"^\| data/(?P<name>\S+) \| (?P<count>\d+) \|", re.MULTILINE)


def row_of(path: Path, expected: int, renderer: Renderer) -> tuple[bool, str]:
    """Read one file three ways: as rows, as samples, as questions."""
    rows = list(read_rows(path))
    notes = Notes()
    skips: Counter[str] = Counter()
    samples = 0
    for item in read_samples([path], renderer, renderer.options, notes):
        if isinstance(item, Skip):
            skips[item.reason] += 1
        else:
            samples += 1
    questions = sum(_asks(row.value) for row in rows if not isinstance(row, Skip))
    # A row may be cut into several samples, and none is lost: every row is a sample, a skip, or both.
    good = len(rows) == notes.counts["rows"] == expected and samples + skips.total() >= expected
    reasons = ", ".join(f"{reason} {count}" for reason, count in skips.most_common())
    shapes = ", ".join(name[6:] for name in sorted(notes.counts) if name.startswith("shape:"))
    mark = "ok " if good else "BAD"
    return good, f"{mark} {path.name:46} {expected:6} {len(rows):6} {samples:7} {questions:6}  {shapes}; {reasons}"


def _asks(value: object) -> bool:
    try:
        parse_question(value, PromptOptions())
    except RowRefused:
        return False
    return True


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.prompts.data_table", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=os.environ.get(FOLDER_VARIABLE))
    folder = parser.parse_args().folder
    if folder is None:
        parser.error(f"name the folder, or set {FOLDER_VARIABLE}")
    known = {found["name"]: int(found["count"]) for found in LINE.finditer((folder / "README.md").read_text("utf-8"))}
    with tempfile.TemporaryDirectory() as scratch:
        options = PromptOptions(max_tokens=1 << 20)
        renderer = Renderer.load(str(model_for(Path(scratch), CHATML)), options)
        sys.stdout.write(f"    {'file':46} {'known':>6} {'rows':>6} {'samples':>7} {'asked':>6}\n")
        outcomes = []
        for name, expected in known.items():
            good, line = row_of(folder / "data" / name, expected, renderer)
            sys.stdout.write(line + "\n")
            outcomes.append(good)
    unknown = {path.name for path in (folder / "data").iterdir()} - known.keys()
    sys.stdout.write(f"{sum(outcomes)} of {len(outcomes)} files as known; not in the table: {sorted(unknown)}\n")
    return 0 if all(outcomes) and not unknown else 1


if __name__ == "__main__":
    sys.exit(main())
