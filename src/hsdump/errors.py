"""Every error a user can meet, and the exit code that a script sees.

    HsdumpError                 70  something else of ours
    ├── UsageError              64  an option, a path or a combination that cannot work
    ├── InputError              65  the input file, its rows, or the model's own files
    ├── ServerError             69  nothing answers, it is not SGLang, or capture is not on there
    ├── PatchError              71  SGLang's installed source: edited, running, not writable, not as it was left
    ├── SpoolError              73  the hand-over folder in shared memory
    └── StoreError              74  the data set on disk
        ├── StoreMismatch       75  it was made with other settings
        ├── StoreBusy           76  another process writes it
        └── StoreCorrupt        77  bytes are not what was committed

`hsdump verify` keeps 0 (clean), 1 (suspicious) and 2 (corrupt) to itself, `hsdump extract` adds 3 (some samples
failed) and 4 (stopped early), so none of the codes above collides with a verdict.

Server-side code imports this module too: standard library only.
"""

from __future__ import annotations

from typing import ClassVar


class HsdumpError(Exception):
    """Says what happened, with the offending value, and what to do next."""

    exit_code: ClassVar[int] = 70

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what, fix)  # both in args, so it survives pickling between workers
        self.what, self.fix = what, fix

    def __str__(self) -> str:
        return f"{self.what}\n  fix: {self.fix}"


class UsageError(HsdumpError):
    exit_code = 64


class InputError(HsdumpError):
    exit_code = 65


class ServerError(HsdumpError):
    exit_code = 69


class PatchError(HsdumpError):
    exit_code = 71


class SpoolError(HsdumpError):
    exit_code = 73


class StoreError(HsdumpError):
    exit_code = 74


class StoreMismatch(StoreError):
    exit_code = 75


class StoreBusy(StoreError):
    exit_code = 76


class StoreCorrupt(StoreError):
    exit_code = 77
