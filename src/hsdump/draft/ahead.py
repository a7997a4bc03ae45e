"""Batches made by a second thread while the device works on the one before.

What a loader's processes hand over has still to be unpacked and copied to the device, some hundred megabytes a step,
for which the training would stand still: one sixth of its time at the shapes of an 8B target.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
POLL_S = 0.2


class Ahead(Generic[T]):
    """An iterator of what another one gives, one piece ahead. `close` ends it early."""

    def __init__(self, source: Iterator[T], device: torch.device, tensors: Callable[[T], list[Tensor]]) -> None:
        """Args:
        source: used in the second thread alone.
        tensors: of a piece, those on the device.
        """
        self._source, self._device, self._tensors = source, device, tensors
        self._made: queue.Queue[tuple[T | None, Any, BaseException | None]] = queue.Queue(maxsize=1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hsdump-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        made, ready, error = self._made.get()
        if error is not None:
            self._thread.join()
            raise error
        assert made is not None
        if ready is not None:
            here = torch.cuda.current_stream(self._device)
            here.wait_event(ready)
            for tensor in self._tensors(made):
                tensor.record_stream(here)  # its memory is the other stream's, which may use it again only afterwards
        return made

    def close(self) -> None:
        """Stop making more, and wait until the source is at rest."""
        self._over.set()
        with suppress(queue.Empty):
            self._made.get_nowait()
        self._thread.join()

    def _run(self) -> None:
        cuda = self._device.type == "cuda"
        try:
            if cuda and self._device.index is not None:
                torch.cuda.set_device(self._device)  # a thread begins with the first one
            stream = torch.cuda.Stream(self._device) if cuda else None
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                for made in self._source:
                    self._put(made, stream.record_event() if stream is not None else None, None)
                    if self._over.is_set():
                        return
            self._put(None, None, StopIteration())
        except BaseException as error:  # noqa: BLE001 - raised where the next piece is asked for
            self._put(None, None, error)

    def _put(self, made: T | None, ready: Any, error: BaseException | None) -> None:
        while not self._over.is_set():
            with suppress(queue.Full):
                self._made.put((made, ready, error), timeout=POLL_S)
                return
