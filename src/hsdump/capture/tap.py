"""Put rows at their place: chunks, batches and replays become whole entries.

A request's rows arrive in any number of pieces: chunked prefill cuts it, batching mixes it with others, retraction
replays it. `(request, position, rows)` is enough to place every row, so replayed rows are simply written again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from hsdump.capture.batch import BatchStates, Segment
from hsdump.spool.names import Rid
from hsdump.spool.writer import OpenEntry, Refused, SpoolWriter

STALE_S = 600.0
"""An entry without a new row for so long is given up: its request was aborted, or its client died."""

_HOUSEKEEPING_S = 5.0


class Tap:
    """Collects the rows of hsdump's requests from successive batches. One a scheduler process, used by one thread."""

    def __init__(self, spool: SpoolWriter) -> None:
        self._spool = spool
        self._open: dict[Rid, OpenEntry] = {}
        self._refused: dict[Rid, float] = {}
        self._next_housekeeping_s = 0.0

    def settle(self) -> None:
        """Nothing is under way when `take` returns. Called before every pass, so that entries whose client died go
        although no next capture comes.
        """
        if self._open:
            self._housekeeping()

    def take(self, segments: Sequence[Segment], states: BatchStates) -> None:
        """Copy the rows of `segments` into their entries; publish those that become complete.

        Never raises for what one request does wrong: that request fails with its reason.
        """
        self._housekeeping()
        shape = self._spool.shape
        columns = [
            _host_bytes(column, segments)
            for column in states.columns(len(shape.layers), shape.hidden_size, _end(segments))
        ]
        ids = states.token_ids[: _end(segments)].to("cpu", torch.int64)
        for segment in segments:
            try:
                self._take_segment(segment, ids, columns)
            except Refused as refusal:
                self._refuse(segment.rid, refusal.reason, refusal.detail)
            except OSError as error:
                self._refuse(segment.rid, "spool-error", str(error))

    def refuse(self, segments: Sequence[Segment], reason: str, detail: str) -> None:
        """Fail all requests of a batch that could not be captured at all."""
        for segment in segments:
            self._refuse(segment.rid, reason, detail)

    def _take_segment(self, segment: Segment, ids: torch.Tensor, columns: list[torch.Tensor]) -> None:
        if segment.rid in self._refused:
            return
        entry = self._open.get(segment.rid) or self._begin(segment)
        last = segment.position + segment.num_rows
        if segment.position > entry.next_row or last > segment.rid.num_tokens:
            raise Refused(
                "rows-missing",
                f"rows {entry.next_row}..{segment.position - 1} were never computed"
                if segment.position > entry.next_row
                else f"rows up to {last - 1} arrived for a request of {segment.rid.num_tokens} tokens",
            )
        rows = slice(segment.first_row, segment.first_row + segment.num_rows)
        layout, row_bytes = entry.layout, self._spool.shape.row_bytes
        self._spool.write(entry, layout.payload_offset + 8 * segment.position, _bytes(ids[rows]))
        for index, column in enumerate(columns):
            offset = layout.state_offset(index) + segment.position * row_bytes
            self._spool.write(entry, offset, _bytes(column[rows]))
        entry.next_row = max(entry.next_row, last)
        entry.touched_s = time.monotonic()
        if entry.next_row == segment.rid.num_tokens:
            del self._open[segment.rid]
            self._spool.publish(entry)

    def _begin(self, segment: Segment) -> OpenEntry:
        if segment.position > 0:
            raise Refused(
                "prefix-cached",
                f"rows 0..{segment.position - 1} were served from the prefix cache and never computed; "
                "capture requests need an extra_key of their own",
            )
        entry = self._spool.begin(segment.rid)
        self._open[segment.rid] = entry
        return entry

    def _refuse(self, rid: Rid, reason: str, detail: str) -> None:
        entry = self._open.pop(rid, None)
        if entry is not None:
            self._spool.abandon(entry)
        if rid not in self._refused:
            self._refused[rid] = time.monotonic()
            self._spool.fail(rid, reason, detail)

    def _housekeeping(self) -> None:
        """Let go of entries whose request will not come back. Bounded work, at most every few seconds."""
        now_s = time.monotonic()
        if now_s < self._next_housekeeping_s:
            return
        self._next_housekeeping_s = now_s + _HOUSEKEEPING_S
        for rid, entry in list(self._open.items()):
            if os.fstat(entry.fd).st_nlink == 0 or now_s - entry.touched_s > STALE_S:
                del self._open[rid]
                self._spool.abandon(entry)
        self._refused = {rid: since for rid, since in self._refused.items() if now_s - since < STALE_S}


def _end(segments: Sequence[Segment]) -> int:
    return max(segment.first_row + segment.num_rows for segment in segments)


def _host_bytes(column_TH: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
    """Bring the rows up to the last one needed to the host, contiguous; no copy when they already are."""
    return column_TH[: _end(segments)].to("cpu").contiguous()


def _bytes(rows: torch.Tensor) -> memoryview:
    return memoryview(rows.contiguous().view(torch.uint8).numpy()).cast("B")
