"""Brings committed shards to a URL in the background, keeps the local folder small, and publishes the index."""

from __future__ import annotations

import sqlite3
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from pathlib import Path
from typing import final

from hsdump.store.attach import Attached
from hsdump.store.format import INDEX_NAME, SHARDS_FOLDER, shard_name, shard_path
from hsdump.store.fs import Fs
from hsdump.store.index import Index
from hsdump.store.opening import disk_errors
from hsdump.store.remote import RemoteError

UPLOADS_AT_ONCE = 2

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 20.0


@final
class Uploader:
    """One open store's uploads. A shard is uploaded when its commit is durable, and deleted here only after that."""

    def __init__(self, attached: Attached, index: Index, fs: Fs) -> None:
        self._attached, self._index, self._fs, self._options = attached, index, fs, attached.options
        self._path = attached.path
        self._pool = ThreadPoolExecutor(UPLOADS_AT_ONCE, "hsdump-upload")
        self._lock = threading.RLock()
        self._running: OrderedDict[int, Future[None]] = OrderedDict()
        self._stop = threading.Event()
        self._failed: BaseException | None = None
        self._here: OrderedDict[int, int] = OrderedDict()
        """Shards in the local folder, oldest first, with their bytes."""

        self._there: set[int] = set()
        self._last_publish_s = time.monotonic()
        missing = []
        for shard in index.shards():
            if shard_path(self._path, shard.number).exists():
                self._here[shard.number] = shard.num_bytes
            if attached.has(shard.number, shard.num_bytes):
                self._there.add(shard.number)
            else:
                missing.append(shard.number)
        self.found_missing = len(missing)
        """Shards that were not there when the store was opened."""

        self._evict()
        self._enqueue(missing)

    def committed(self, shards: dict[int, int]) -> None:
        """Take over shards that were just committed, and wait until the local folder is small enough again.

        Raises nothing for what goes wrong at the URL, since the commit holds: `check` does.

        Args:
            shards: number to bytes.
        """
        with self._lock:
            self._here.update(shards)
        self._enqueue(shards)
        limit = self._options.local_bytes
        while limit is not None and self._failed is None and self.local_bytes > limit:
            with self._lock:
                self._collect()
                oldest = next(iter(self._running.values()), None)
            if oldest is None:
                return
            wait([oldest])

    def check(self) -> None:
        """Say what went wrong since.

        Raises:
            RemoteError: uploads failed for longer than is patient. The shards are safe in the local folder.
        """
        with self._lock:
            self._collect()
            failed = self._failed
        if failed is not None:
            raise failed

    def finish(self) -> None:
        """Wait until all is there, publish the index, and let other folders write.

        Raises:
            RemoteError: it cannot be done; the next writer of this folder goes on.
        """
        wait(self._running.values())
        self.check()
        self._patiently(self._publish)
        self._patiently(self._attached.release)

    def close(self) -> None:
        """Stop; what was not uploaded stays here."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    @property
    def local_bytes(self) -> int:
        """Bytes of committed shards in the local folder."""
        with self._lock:
            return sum(self._here.values())

    def _enqueue(self, numbers: Iterable[int]) -> None:
        with self._lock:
            for number in numbers:
                self._running[number] = self._pool.submit(self._upload, number)

    def _collect(self) -> None:
        """Put away finished uploads, and keep what ended one."""
        for number in [number for number, future in self._running.items() if future.done()]:
            self._failed = self._failed or self._running.pop(number).exception()

    def _upload(self, number: int) -> None:
        """Runs in the pool: put a shard there, then see what else is to be done."""
        self._patiently(lambda: self._put(number))
        with self._lock:
            self._evict()
            if time.monotonic() - self._last_publish_s > self._options.publish_s and not self._stop.is_set():
                with suppress(RemoteError):  # tried again after the next upload, and at last by `finish`
                    self._publish()

    def _put(self, number: int) -> None:
        path = shard_path(self._path, number)
        if path.exists():  # else it was taken out again before it got there
            self._attached.remote.put_file(path, f"{SHARDS_FOLDER}/{shard_name(number)}")
            with self._lock:
                self._there.add(number)

    def _patiently(self, act: Callable[[], None]) -> None:
        """Do it, trying again while patience lasts."""
        give_up_s, pause_s = time.monotonic() + self._options.patience_s, FIRST_PAUSE_S
        while not self._stop.is_set():
            try:
                return act()
            except RemoteError:
                if time.monotonic() + pause_s > give_up_s:
                    raise
            self._stop.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return None

    def _evict(self) -> None:
        """Delete the oldest uploaded shards here until few enough bytes are left."""
        limit = self._options.local_bytes
        if limit is None:
            return
        left = self.local_bytes
        for number in [number for number in self._here if number in self._there]:
            if left <= limit:
                return
            with disk_errors(self._path):
                self._fs.remove(shard_path(self._path, number))
            left -= self._here.pop(number)

    def _publish(self) -> None:
        """Put an index there that knows exactly the shards that are there, then delete those that it dropped."""
        with self._lock, disk_errors(self._path):
            there, dropped = set(self._there), self._index.dropped_remote()
            with tempfile.TemporaryDirectory(prefix="hsdump-publish-") as folder:
                snapshot = Path(folder) / INDEX_NAME
                self._index.backup(snapshot)
                _keep_only(snapshot, there)
                self._attached.remote.put_file(snapshot, INDEX_NAME)
            for number in dropped:
                self._attached.remote.remove(f"{SHARDS_FOLDER}/{shard_name(number)}")
                self._there.discard(number)
            if dropped:
                with self._index.transaction():
                    self._index.forget_dropped(dropped)
            self._last_publish_s = time.monotonic()


def _keep_only(snapshot: Path, shards: set[int]) -> None:
    """Take out of a copied index what is not at the URL (yet), and what concerns this folder alone."""
    with closing(sqlite3.connect(snapshot)) as db:
        numbers = [number for (number,) in db.execute("SELECT number FROM shards")]
        gone = [(number,) for number in numbers if number not in shards]
        db.executemany("DELETE FROM samples WHERE shard = ?", gone)
        db.executemany("DELETE FROM shards WHERE number = ?", gone)
        db.execute("DELETE FROM requests")
        db.commit()
