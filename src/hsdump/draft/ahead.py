"""Batches made by a second thread while the device works on the one before.

What a loader's processes hand over has still to be unpacked and copied to the device, some hundred megabytes a step,
for which the training would stand still: one sixth of its time at the shapes of an 8B target.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

CLOSE_S = 30.0
"""A source that does not give its next piece by then is left to itself: its thread ends with the process."""


class Ahead(Generic[T]):
    """An iterator of what another one gives, one piece ahead. `close` ends it early."""

    def __init__(self, source: Iterator[T], device: torch.device, tensors: Callable[[T], list[Tensor]]) -> None:
        """Args:
        source: used in the second thread alone.
        tensors: of a piece, those on the device.
        """
        self._source, self._device, self._tensors = source, device, tensors
        self._made: queue.SimpleQueue[tuple[T, Any] | BaseException] = queue.SimpleQueue()
        self._wanted = threading.Semaphore(1)
        self._closed = False
        self._end: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hsdump-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._end is None:
            found = self._made.get()
            if not isinstance(found, BaseException):
                self._wanted.release()
                return self._taken_over(*found)
            self._end = found
        raise self._end

    def _taken_over(self, made: T, ready: Any) -> T:
        """Have this thread's stream wait for a piece, and the other one's not use its memory again before."""
        if ready is not None:
            here = torch.cuda.current_stream(self._device)
            here.wait_event(ready)
            for tensor in self._tensors(made):
                tensor.record_stream(here)
        return made

    def close(self) -> None:
        """Stop making more, and wait until the source is at rest."""
        self._closed = True
        self._wanted.release()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        cuda = self._device.type == "cuda"
        try:
            if cuda and self._device.index is not None:
                torch.cuda.set_device(self._device)  # a thread begins with the first one
            stream = torch.cuda.Stream(self._device) if cuda else None
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                while True:
                    self._wanted.acquire()
                    if self._closed:
                        return
                    made = next(self._source)
                    self._made.put((made, stream.record_event() if stream is not None else None))
        except BaseException as error:  # noqa: BLE001 - raised where the next piece is asked for
            self._made.put(error)
