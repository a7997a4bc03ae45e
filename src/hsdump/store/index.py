"""`index.sqlite`: which samples are committed and where, which failed and why. Everything but failures, skips and
events can be made again from the shards.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

from hsdump.errors import StoreCorrupt, StoreError
from hsdump.keys import KeySet, is_key
from hsdump.store.format import SampleRecord, ShardHeader, TensorEntry
from hsdump.store.fs import Fs
from hsdump.store.manifest import FORMAT_VERSION

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS shards (
    number INTEGER PRIMARY KEY, num_bytes INTEGER NOT NULL, header_bytes INTEGER NOT NULL, checksum TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS samples (
    position INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, source TEXT NOT NULL, num_tokens INTEGER NOT NULL,
    num_learned INTEGER NOT NULL, attempts INTEGER NOT NULL, shard INTEGER NOT NULL REFERENCES shards (number),
    tensors BLOB NOT NULL, errors BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS samples_by_shard ON samples (shard);
CREATE TABLE IF NOT EXISTS failures (
    key TEXT PRIMARY KEY, source TEXT NOT NULL, num_tokens INTEGER NOT NULL, reason TEXT NOT NULL,
    detail TEXT NOT NULL, attempts INTEGER NOT NULL, at TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS skips (
    source TEXT NOT NULL, reason TEXT NOT NULL, detail TEXT NOT NULL, PRIMARY KEY (source, reason, detail));
CREATE TABLE IF NOT EXISTS requests (
    key TEXT PRIMARY KEY, source TEXT NOT NULL, num_tokens INTEGER NOT NULL, state TEXT NOT NULL,
    request_id TEXT NOT NULL, server TEXT NOT NULL, at TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events (at TEXT NOT NULL, kind TEXT NOT NULL, subject TEXT NOT NULL, detail TEXT NOT NULL);
"""

DROPPED = "remote-drop:"
"""Beginning of a name in `meta`, before the number of a shard."""

SAMPLE_COLUMNS = "position, key, source, num_tokens, num_learned, attempts, shard, tensors, errors"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a sample has no states."""

    key: str
    source: str
    num_tokens: int
    reason: str
    detail: str
    attempts: int
    at: str
    """UTC, ISO 8601."""


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """A sample that is neither committed nor failed yet, as the writing run last noted it."""

    key: str
    source: str
    num_tokens: int
    state: str
    """`pending` (read, waits for room), `sent` or `captured` (waits for its commit)."""

    request_id: str
    """As the server knows it; empty while pending."""

    server: str
    at: str
    """UTC, ISO 8601."""


class SkippedRow(msgspec.Struct, frozen=True, kw_only=True):
    """An input row that never became a sample."""

    source: str
    reason: str
    detail: str


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a recovery or repair did."""

    kind: str
    """`partial-removed`, `shard-indexed`, `shard-quarantined`, `sample-lost`, `index-rebuilt`, `index-restored`,
    `manifest-rebuilt`, `manifest-quarantined`, `remote-shard-indexed`, `remote-shard-ignored`; by repairs
    `shard-repaired`, by `hsdump store rm` `samples-removed`.
    """

    subject: str
    detail: str
    at: str = ""


class IndexedShard(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    num_bytes: int
    header_bytes: int
    checksum: str
    """Of the header, which guards the rest."""


class IndexedSample(msgspec.Struct, frozen=True, kw_only=True):
    """A committed sample and its place."""

    position: int
    shard: int
    record: SampleRecord


def utc_now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class Index:
    """One connection. Writers own it alone; a reader's may be shared by threads."""

    def __init__(self, connection: sqlite3.Connection, fs: Fs | None = None) -> None:
        self._db, self._fs = connection, fs or Fs()
        self._lock = threading.RLock()

    @classmethod
    def create_or_open(cls, path: Path, fs: Fs) -> Index:
        """Open for writing.

        Raises:
            StoreCorrupt: the file is no database, or a damaged one.
            StoreError: it cannot be opened.
        """
        is_new = not path.exists()
        fs.index_step("open")
        with _translated(path):
            db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=60)
            try:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=FULL")
                if not is_new and db.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                    raise StoreCorrupt(f"{path} is a damaged database", "it is made again from the shards")
                db.executescript(f"BEGIN IMMEDIATE;{SCHEMA}COMMIT;")
            except BaseException:
                db.close()
                raise
        if is_new:
            fs.sync_folder(path.parent)
        return cls(db, fs)

    @classmethod
    def open_to_read(cls, path: Path) -> Index | None:
        """Open beside a possible writer, on a read-only medium too; None where there is no index (yet).

        Raises:
            StoreCorrupt, StoreError: as `create_or_open`.
        """
        if not path.exists():
            return None
        with _translated(path):
            try:
                return cls(_connect_read_only(path, "mode=ro"))
            except sqlite3.OperationalError as error:
                if "no such table" in str(error):
                    return None  # its writer is about to make them
                # Write-ahead logging needs a shared-memory file beside the database. Where that cannot be made and no
                # log is left, nothing is pending and the database alone is the truth.
                if path.with_name(path.name + "-wal").exists():
                    raise
                return cls(_connect_read_only(path, "mode=ro&immutable=1"))

    @classmethod
    def in_memory(cls) -> Index:
        """Make an empty index that is never written to disk."""
        db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        db.executescript(SCHEMA)
        return cls(db)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[None]:
        """Make all that is done inside durable together, or none of it.

        Args:
            durable: without it a killed process loses nothing either, but a machine without power may lose the newest
                of it: no fsync, which waits for half a second while a disk has shards to write.
        """
        with self._lock, _translated(None):
            self._fs.index_step("begin")
            self._db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._fs.index_step("commit")
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            self._fs.index_step("committed")

    # Reading

    def get_meta(self, name: str) -> str | None:
        rows = self._rows("SELECT value FROM meta WHERE name = ?", name)
        return rows[0][0] if rows else None

    def key_set(self) -> KeySet:
        """Give the keys of committed samples. What damage made of a key is no sample's: it is left to a scrub."""
        with self._lock, _translated(None), closing(self._db.execute("SELECT key FROM samples")) as cursor:
            return KeySet(key for (key,) in cursor if is_key(key))

    def keys(self) -> list[str]:
        """List the keys of committed samples, in order of their commit."""
        query = "SELECT key FROM samples ORDER BY position"
        # Row by row: of a million samples the rows alone would take 130 MB beside the keys.
        with self._lock, _translated(None), closing(self._db.execute(query)) as cursor:
            return [key for (key,) in cursor]

    def positions(self) -> list[int]:
        return [row[0] for row in self._rows("SELECT position FROM samples ORDER BY position")]

    def lengths(self) -> list[int]:
        """List the tokens of each sample, in order of commit."""
        return [row[0] for row in self._rows("SELECT num_tokens FROM samples ORDER BY position")]

    def sample(self, key: str) -> IndexedSample | None:
        rows = self._rows(f"SELECT {SAMPLE_COLUMNS} FROM samples WHERE key = ?", key)  # noqa: S608 - a constant
        return _sample(rows[0]) if rows else None

    def sample_at(self, position: int) -> IndexedSample | None:
        rows = self._rows(f"SELECT {SAMPLE_COLUMNS} FROM samples WHERE position = ?", position)  # noqa: S608 - a constant
        return _sample(rows[0]) if rows else None

    def samples(self, shard: int) -> list[IndexedSample]:
        """List a shard's samples."""
        query = f"SELECT {SAMPLE_COLUMNS} FROM samples WHERE shard = ? ORDER BY position"  # noqa: S608 - a constant
        return [_sample(row) for row in self._rows(query, shard)]

    def shards(self) -> list[IndexedShard]:
        names = ("number", "num_bytes", "header_bytes", "checksum")
        rows = self._rows("SELECT number, num_bytes, header_bytes, checksum FROM shards ORDER BY number")
        return [IndexedShard(**dict(zip(names, row, strict=True))) for row in rows]

    def totals(self) -> tuple[int, int, int]:
        """Count samples, tokens, learned tokens."""
        query = "SELECT COUNT(*), COALESCE(SUM(num_tokens), 0), COALESCE(SUM(num_learned), 0) FROM samples"
        samples, tokens, learned = self._rows(query)[0]
        return samples, tokens, learned

    def failures(self) -> dict[str, Failure]:
        names = ("key", "source", "num_tokens", "reason", "detail", "attempts", "at")
        rows = self._rows("SELECT key, source, num_tokens, reason, detail, attempts, at FROM failures ORDER BY at, key")
        return {row[0]: Failure(**dict(zip(names, row, strict=True))) for row in rows}

    def skips(self) -> Counter[str]:
        return Counter(dict(self._rows("SELECT reason, COUNT(*) FROM skips GROUP BY reason")))

    def skipped_rows(self) -> list[SkippedRow]:
        rows = self._rows("SELECT source, reason, detail FROM skips ORDER BY source")
        return [SkippedRow(source=source, reason=reason, detail=detail) for source, reason, detail in rows]

    def events(self) -> list[Event]:
        rows = self._rows("SELECT at, kind, subject, detail FROM events ORDER BY rowid")
        return [Event(at=at, kind=kind, subject=subject, detail=detail) for at, kind, subject, detail in rows]

    def requests(self) -> list[RequestRow]:
        """List the samples in between; empty for a store of an hsdump that did not keep them."""
        if not self._rows("SELECT name FROM sqlite_master WHERE name = 'requests'"):
            return []
        names = ("key", "source", "num_tokens", "state", "request_id", "server", "at")
        rows = self._rows(
            "SELECT key, source, num_tokens, state, request_id, server, at FROM requests ORDER BY at, key"
        )
        return [RequestRow(**dict(zip(names, row, strict=True))) for row in rows]

    def dropped_remote(self) -> list[int]:
        """List shards that were taken out and whose copies at the store's URL are to be deleted."""
        rows = self._rows("SELECT name FROM meta WHERE name LIKE ?", DROPPED + "%")
        return sorted(int(name.removeprefix(DROPPED)) for (name,) in rows)

    def backup(self, path: Path) -> None:
        """Write a copy of the whole index, as it is now."""
        with self._lock, _translated(path), closing(sqlite3.connect(path)) as copy:
            self._db.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # one file, readable where nothing can be written

    # Writing: inside `transaction`

    def set_meta(self, name: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def set_up(self, manifest_digest: str) -> None:
        """Tie the index to its manifest."""
        self.set_meta("format_version", str(FORMAT_VERSION))
        self.set_meta("manifest_digest", manifest_digest)

    def add_shard(self, header: ShardHeader, header_bytes: int) -> list[str]:
        """Enter a shard and its samples.

        Returns:
            Keys that were committed already, elsewhere: those stay as they are.
        """
        row = (header.number, header.file_bytes, header_bytes, header.checksum)
        self._db.execute("INSERT INTO shards VALUES (?, ?, ?, ?)", row)
        known = []
        for record in header.samples:
            row_ids = (record.key, record.source, record.num_tokens, record.num_learned, record.attempts, header.number)
            blobs = (msgspec.json.encode(record.tensors), msgspec.json.encode(record.errors))
            cursor = self._db.execute(
                "INSERT OR IGNORE INTO samples (key, source, num_tokens, num_learned, attempts, shard, tensors, errors)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                row_ids + blobs,
            )
            if cursor.rowcount == 0:
                known.append(record.key)
            self._db.execute("DELETE FROM failures WHERE key = ?", (record.key,))
            self._db.execute("DELETE FROM requests WHERE key = ?", (record.key,))
        return known

    def remove_shard(self, number: int, *, dropped_remote: bool = False) -> None:
        """Forget a shard and its samples.

        Args:
            dropped_remote: its copy at the store's URL is to be deleted as soon as the index there is without it.
        """
        if dropped_remote:
            self.set_meta(f"{DROPPED}{number}", "")
        self._db.execute("DELETE FROM samples WHERE shard = ?", (number,))
        self._db.execute("DELETE FROM shards WHERE number = ?", (number,))

    def forget_dropped(self, numbers: Iterable[int]) -> None:
        """The copies of these shards are gone."""
        self._db.executemany("DELETE FROM meta WHERE name = ?", [(f"{DROPPED}{number}",) for number in numbers])

    def add_failure(self, failure: Failure) -> None:
        values = msgspec.structs.astuple(failure)
        self._db.execute("INSERT OR REPLACE INTO failures VALUES (?, ?, ?, ?, ?, ?, ?)", values)
        self._db.execute("DELETE FROM requests WHERE key = ?", (failure.key,))

    def set_requests(self, rows: Iterable[RequestRow], gone: Iterable[str]) -> None:
        """Note where samples are, except committed ones, and forget those that went back to the input."""
        values = [(*msgspec.structs.astuple(row), row.key) for row in rows]
        self._db.executemany(
            "INSERT OR REPLACE INTO requests SELECT ?, ?, ?, ?, ?, ?, ?"
            " WHERE NOT EXISTS (SELECT 1 FROM samples WHERE key = ?)",
            values,
        )
        self._db.executemany("DELETE FROM requests WHERE key = ?", [(key,) for key in gone])

    def clear_requests(self) -> None:
        self._db.execute("DELETE FROM requests")

    def add_skips(self, rows: Iterable[SkippedRow]) -> None:
        values = [(row.source, row.reason, row.detail) for row in rows]
        self._db.executemany("INSERT OR IGNORE INTO skips VALUES (?, ?, ?)", values)

    def add_event(self, event: Event) -> None:
        values = (event.at or utc_now(), event.kind, event.subject, event.detail)
        self._db.execute("INSERT INTO events VALUES (?, ?, ?, ?)", values)

    def _rows(self, query: str, *values: Any) -> list[Any]:
        with self._lock, _translated(None), closing(self._db.execute(query, values)) as cursor:
            return cursor.fetchall()


def _connect_read_only(path: Path, options: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{options}"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=60)
    try:
        db.execute("SELECT COUNT(*) FROM meta").fetchone()
    except BaseException:
        db.close()
        raise
    return db


@contextmanager
def _translated(path: Path | None) -> Iterator[None]:
    """The one place that knows what sqlite raises."""
    name = path or "the index"
    try:
        yield
    except sqlite3.OperationalError as error:
        fix = "see that the disk has room and that the folder is writable, then run the same command again"
        raise StoreError(f"{name} cannot be used: {error}", fix) from error
    except sqlite3.DatabaseError as error:
        fix = "make it again from the shards: hsdump store scrub --repair STORE"
        raise StoreCorrupt(f"{name} is damaged: {error}", fix) from error


def _sample(row: tuple[Any, ...]) -> IndexedSample:
    position, key, source, num_tokens, num_learned, attempts, shard, tensors, errors = row
    record = SampleRecord(
        key=key,
        source=source,
        num_tokens=num_tokens,
        num_learned=num_learned,
        attempts=attempts,
        tensors=msgspec.json.decode(tensors, type=list[TensorEntry]),
        errors=msgspec.json.decode(errors, type=dict[str, float]),
    )
    return IndexedSample(position=position, shard=shard, record=record)
