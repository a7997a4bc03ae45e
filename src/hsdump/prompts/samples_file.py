"""The file that `hsdump prepare` writes and `hsdump extract` reads again: one Parquet row a sample.

Columns: `input_ids` list<int32>, `loss_mask` list<uint8> of the same length, `source` and `digest` (the sample's key)
as text, and `mask`, how the mask was found (`generation`, `sentinel`, `prefix`, `all`, `given`). The schema's metadata
key `hsdump` holds JSON: what made the tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from hsdump.errors import UsageError
from hsdump.samples import TokenSample

_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("source", pa.string()),
        ("digest", pa.string()),
        ("mask", pa.string()),
    ]
)
_GROUP_TOKENS = 4 << 20
"""Tokens of a row group: 20 MiB of memory while writing, and what a reader holds at once."""

_GROUP_ROWS = 16_384
"""Short samples are held as objects of about 1 KiB until their group is written."""


class SamplesWriter:
    """Appends samples to an open file; see `writing_samples`."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self._writer = writer
        self._rows: list[TokenSample] = []
        self._masks: list[str] = []
        self._tokens = 0

    def append(self, sample: TokenSample, mask: str) -> None:
        self._rows.append(sample)
        self._masks.append(mask)
        self._tokens += len(sample.input_ids)
        if self._tokens >= _GROUP_TOKENS or len(self._rows) >= _GROUP_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting as one row group."""
        rows, self._rows, self._tokens = self._rows, [], 0
        masks, self._masks = self._masks, []
        if not rows:
            return
        columns = [
            pa.array([row.input_ids for row in rows], type=_SCHEMA.field("input_ids").type),
            pa.array([row.loss_mask for row in rows], type=_SCHEMA.field("loss_mask").type),
            pa.array([row.source for row in rows], type=pa.string()),
            pa.array([row.key for row in rows], type=pa.string()),
            pa.array(masks, type=pa.string()),
        ]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self._writer.schema))


@contextmanager
def writing_samples(path: Path, settings: dict[str, Any]) -> Iterator[SamplesWriter]:
    """Write a samples file that shows up at `path` complete, or not at all.

    Args:
        path: replaced if it exists.
        settings: what made the tokens, kept in the file's metadata.

    Raises:
        UsageError: the folder cannot be written.
    """
    partial = path.with_name(f"{path.name}.{uuid4().hex}.partial")
    schema = _SCHEMA.with_metadata({"hsdump": msgspec.json.encode(settings)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = partial.open("xb")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", "choose another --out") from error
    try:
        with file:
            with pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer:
                samples = SamplesWriter(writer)
                yield samples
                samples.flush()
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_settings(path: Path) -> dict[str, Any]:
    """Give what made a samples file; empty for any other file."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"PAR1":
                return {}
        metadata = pq.read_schema(path).metadata or {}
        return dict(msgspec.json.decode(metadata[b"hsdump"])) if b"hsdump" in metadata else {}
    except (OSError, pa.ArrowException, msgspec.DecodeError):
        return {}  # whatever is wrong with the file, reading its rows will say it
