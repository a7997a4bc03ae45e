"""Train in a process of its own, so that it can be killed: `python -m tests.draft.train_child FOLDER NAME`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from hsdump.draft.train import train
from tests.draft.making import SMALL, sources_in

if __name__ == "__main__":
    torch.set_num_threads(1)
    train(sources_in(Path(sys.argv[1]), sys.argv[2]), SMALL, quiet=True)
