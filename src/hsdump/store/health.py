"""Whether a writer may go on after what the disk did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from hsdump.errors import StoreError
from hsdump.store.opening import disk_errors


@final
class Health:
    """After a failed write or fsync nobody knows what the kernel kept, so its writer must not go on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problem: str | None = None

    def give_up(self, why: str) -> None:
        """From here on nothing may be written; the first reason stays."""
        self.problem = self.problem or why

    def check(self) -> None:
        """Raises:
        StoreError: something failed before.
        """
        if self.problem is not None:
            raise StoreError(f"{self._path} cannot be written any more: {self.problem}", "open it again")

    @contextmanager
    def all_or_broken(self) -> Iterator[None]:
        """What fails inside is the end."""
        try:
            with disk_errors(self._path):
                yield
        except BaseException as error:
            self.give_up(str(error.what if isinstance(error, StoreError) else error) or type(error).__name__)
            raise

    @contextmanager
    def checked(self) -> Iterator[None]:
        """The same for a thread beside the writer's, for which nobody called `check`."""
        self.check()
        with self.all_or_broken():
            yield
