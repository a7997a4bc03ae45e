"""Reading what is at a URL: the index is fetched once, samples one ranged read each, nothing else is kept here."""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from hsdump.errors import StoreCorrupt, StoreError
from hsdump.store.format import INDEX_NAME, MANIFEST_NAME, SHARDS_FOLDER, shard_name
from hsdump.store.remote import Remote


@final
class RemoteReader:
    """The read side of a store at a URL. Connects when it is first needed."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._remote: Remote | None = None
        self._lock = threading.Lock()

    def fetch_facts(self) -> Path:
        """Bring manifest and index to a folder of their own, which goes when this object does.

        Raises:
            StoreError: there is no store.
            RemoteError: it cannot be reached.
        """
        folder = Path(tempfile.mkdtemp(prefix="hsdump-remote-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        # The index first: it may know less than the shards that are there, never more.
        self._connected().get_file(INDEX_NAME, folder / INDEX_NAME)
        if not self._connected().get_file(MANIFEST_NAME, folder / MANIFEST_NAME):
            raise StoreError(f"{self.url} is not a store: it has no {MANIFEST_NAME}", "see that the URL is right")
        return folder

    def read(self, shard: int, start: int, end: int) -> bytes:
        """Read a stretch of a shard.

        Raises:
            StoreCorrupt: the shard is gone, or ends before.
            RemoteError: it cannot be read.
        """
        name = f"{SHARDS_FOLDER}/{shard_name(shard)}"
        data = self._connected().read(name, start, end)
        if data is None or len(data) != end - start:
            found = "it is not there" if data is None else f"it ends after {start + len(data)} bytes"
            raise StoreCorrupt(
                f"{self.url}/{name} cannot be read: {found}", "open the store again, it may have changed"
            )
        return data

    @contextmanager
    def fetched(self, shard: int) -> Iterator[Path]:
        """Download a shard for as long as the body runs; the path does not exist when there is none."""
        with tempfile.TemporaryDirectory(prefix="hsdump-shard-") as folder:
            path = Path(folder) / shard_name(shard)
            self._connected().get_file(f"{SHARDS_FOLDER}/{path.name}", path)
            yield path

    def _connected(self) -> Remote:
        with self._lock:
            if self._remote is None:
                self._remote = Remote(self.url)
            return self._remote
