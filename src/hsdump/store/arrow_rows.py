"""Tokens and masks as the Arrow folder that `datasets.load_from_disk` reads, written with pyarrow alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pyarrow as pa

from hsdump.store.fs import Fs
from hsdump.store.reader import Store

FILE_NAME = "data-00000-of-00001.arrow"
ROWS_PER_BATCH = 1000


def write_arrow_rows(store: Store, out: Path, fs: Fs) -> None:
    """Write one row a sample, in the store's order: row i belongs to hs_<i>.safetensors."""
    schema = pa.schema(
        [
            ("input_ids", pa.list_(pa.int64())),
            ("loss_mask", pa.list_(pa.int64())),
            ("seq_len", pa.int64()),
        ]
    )
    partial = out / (FILE_NAME + ".partial")
    with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for first in range(0, len(store), ROWS_PER_BATCH):
            samples = [store[place] for place in range(first, min(first + ROWS_PER_BATCH, len(store)))]
            columns = {
                "input_ids": [sample.input_ids for sample in samples],
                "loss_mask": [sample.loss_mask.astype("int64") for sample in samples],
                "seq_len": [sample.num_tokens for sample in samples],
            }
            writer.write_batch(pa.RecordBatch.from_pydict(columns, schema=schema))
    fs.rename(partial, out / FILE_NAME)
    number = {"dtype": "int64", "_type": "Value"}
    numbers = {"feature": number, "_type": "List"}
    info = {"features": {"input_ids": numbers, "loss_mask": numbers, "seq_len": number}}
    state: dict[str, object] = {
        "_data_files": [{"filename": FILE_NAME}],
        "_fingerprint": store.manifest.digest[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": "torch",  # its reader compares tokens as tensors
        "_output_all_columns": False,
        "_split": None,
    }
    fs.write_file(out / "dataset_info.json", msgspec.json.encode(info))
    fs.write_file(out / "state.json", msgspec.json.encode(state))
