"""The data set on disk. Knows no engine, no HTTP and no torch; docs/format.md is its specification."""

from hsdump.store.index import Failure, SkipRow
from hsdump.store.manifest import Manifest
from hsdump.store.reader import Store, StoredSample
from hsdump.store.writer import StoreWriter, WriterOptions

__all__ = ["Failure", "Manifest", "SkipRow", "Store", "StoreWriter", "StoredSample", "WriterOptions"]
