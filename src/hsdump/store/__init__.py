"""The data set on disk. docs/format.md is the specification of its bytes."""

from hsdump.store.index import Failure
from hsdump.store.manifest import Manifest
from hsdump.store.options import WriterOptions
from hsdump.store.reader import Store, StoredSample
from hsdump.store.writer import StoreWriter

__all__ = ["Failure", "Manifest", "Store", "StoreWriter", "StoredSample", "WriterOptions"]
