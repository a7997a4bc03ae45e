"""Rows of Parquet and Arrow files, and zstd streams: the part of reading that needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hsdump.prompts.row import Row

_BATCH_ROWS = 256
_TOKEN_COLUMNS = frozenset({"input_ids", "loss_mask"})


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Damaged files look the same to the caller, whatever reads them."""
    try:
        yield
    except pa.ArrowException as error:
        raise OSError(str(error)) from error


def zstd_stream(path: Path) -> Any:
    """Open a zstd file as a stream of its content."""
    return pa.input_stream(path, compression="zstd")


def parquet_rows(path: Path) -> Iterator[Row]:
    """Read a Parquet file batch by batch.

    Raises:
        OSError: it is damaged.
    """
    with _as_os_errors(), pq.ParquetFile(path, page_checksum_verification=True) as file:
        yield from _table_rows(path.name, file.iter_batches(batch_size=_BATCH_ROWS))


def arrow_rows(path: Path, *, stream: bool) -> Iterator[Row]:
    """Read Arrow's file format and its stream format, which `datasets` writes under the name .arrow.

    Raises:
        OSError: it is damaged.
    """
    with _as_os_errors(), pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_stream(source) if stream else pa.ipc.open_file(source)
        batches = reader if stream else (reader.get_batch(index) for index in range(reader.num_record_batches))
        yield from _table_rows(
            path.name,
            (batch.slice(at, _BATCH_ROWS) for batch in batches for at in range(0, batch.num_rows, _BATCH_ROWS)),
        )


def _table_rows(name: str, batches: Iterable[Any]) -> Iterator[Row]:
    index = 0
    for batch in batches:
        tokens = {
            column: batch.column(column)
            for column, kind in zip(batch.schema.names, batch.schema.types, strict=True)
            if column in _TOKEN_COLUMNS and pa.types.is_list(kind) and pa.types.is_integer(kind.value_type)
        }
        others = [column for column in batch.schema.names if column not in tokens]
        values = batch.select(others).to_pylist() if others else [{} for _ in range(batch.num_rows)]
        for place, value in enumerate(values):
            # Token columns go to numpy directly: one Python object a token would cost 100 times the memory.
            for column, array in tokens.items():
                value[column] = array[place].values.to_numpy() if array[place].is_valid else None
            yield Row(source=f"{name}[{index}]", value=value)
            index += 1
