"""`index.sqlite`: one row a sample, whatever became of it. Rebuilt from the shards when it is lost."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from hsdump.errors import StoreCorrupt, StoreError
from hsdump.samples import TokenSample
from hsdump.store.format import SampleRecord, TensorRecord

FILE_NAME = "index.sqlite"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS shards (
  name TEXT PRIMARY KEY, num_bytes INTEGER NOT NULL, header_xxh3 TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS samples (
  key TEXT PRIMARY KEY, source TEXT NOT NULL, status TEXT NOT NULL CHECK (status IN ('committed', 'failed')),
  shard TEXT, num_tokens INTEGER NOT NULL, loss_tokens INTEGER NOT NULL, attempts INTEGER NOT NULL,
  tensors BLOB, reason TEXT, detail TEXT, at TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS samples_by_shard ON samples (shard);
CREATE TABLE IF NOT EXISTS skips (
  source TEXT NOT NULL, reason TEXT NOT NULL, detail TEXT NOT NULL, at TEXT NOT NULL, PRIMARY KEY (source, reason));
CREATE TABLE IF NOT EXISTS events (at TEXT NOT NULL, what TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Failure:
    """A sample that has no states, and why."""

    key: str
    source: str
    reason: str
    detail: str
    attempts: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SkipRow:
    """An input row that never became a sample, and why."""

    source: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class ShardRow:
    """A shard as it was when it was committed."""

    name: str
    num_bytes: int
    header_xxh3: str


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A committed sample."""

    shard: str
    record: SampleRecord


class Index:
    """One connection to the index. A writer's commits are durable when they return; readers never block it."""

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        """Raises:
        StoreCorrupt: the file is no index.
        """
        self.path = folder / FILE_NAME
        try:
            if read_only:
                self._db = _connect_read_only(self.path)
            else:
                self._db = sqlite3.connect(self.path, timeout=30, isolation_level=None)
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")
                self._db.executescript(_SCHEMA)
            self._db.execute("SELECT count(*) FROM samples").fetchone()
        except sqlite3.DatabaseError as error:
            raise StoreCorrupt(
                f"{self.path} cannot be read ({error})",
                "open the store for writing once (hsdump extract or scrub): the index is rebuilt from the shards",
            ) from error

    def close(self) -> None:
        self._db.close()

    def meta(self, name: str) -> str | None:
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return row[0] if row else None

    def set_meta(self, name: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def commit_shard(self, shard: ShardRow, samples: Iterable[SampleRecord]) -> None:
        """Make a shard's samples visible, all or none."""
        now = _now()
        rows = [
            (s.key, s.source, shard.name, s.num_tokens, s.loss_tokens, s.attempts, msgspec.json.encode(s.tensors), now)
            for s in samples
        ]
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(
                "INSERT OR REPLACE INTO shards VALUES (?, ?, ?)", (shard.name, shard.num_bytes, shard.header_xxh3)
            )
            self._db.executemany(
                "INSERT OR REPLACE INTO samples VALUES (?, ?, 'committed', ?, ?, ?, ?, ?, NULL, NULL, ?)", rows
            )
            self._db.execute("COMMIT")
        except BaseException as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError):
                raise OSError(f"{self.path}: {error}") from error
            raise

    def record_failure(self, sample: TokenSample, reason: str, detail: str, attempts: int) -> None:
        """Note a failure; a committed sample is never overwritten by one."""
        self._db.execute(
            "INSERT INTO samples VALUES (?, ?, 'failed', NULL, ?, ?, ?, NULL, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET "
            "reason = excluded.reason, detail = excluded.detail, attempts = excluded.attempts, at = excluded.at "
            "WHERE status = 'failed'",
            (
                sample.key,
                sample.source,
                len(sample.input_ids),
                int(sample.loss_mask.sum()),
                attempts,
                reason,
                detail,
                _now(),
            ),
        )

    def record_skip(self, source: str, reason: str, detail: str) -> None:
        self._db.execute("INSERT OR IGNORE INTO skips VALUES (?, ?, ?, ?)", (source, reason, detail, _now()))

    def record_event(self, what: str) -> None:
        """Keep what recovery did: nothing is set right in silence."""
        self._db.execute("INSERT INTO events VALUES (?, ?)", (_now(), what))

    def forget_shard(self, name: str) -> int:
        """Make a lost shard's samples missing again; give their number."""
        lost = self._db.execute("DELETE FROM samples WHERE shard = ?", (name,)).rowcount
        self._db.execute("DELETE FROM shards WHERE name = ?", (name,))
        return lost

    def shards(self) -> dict[str, ShardRow]:
        return {row[0]: ShardRow(*row) for row in self._db.execute("SELECT * FROM shards ORDER BY name")}

    def committed_keys(self) -> list[str]:
        query = "SELECT key FROM samples WHERE status = 'committed' ORDER BY shard, rowid"
        return [row[0] for row in self._db.execute(query)]

    def num_committed(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM samples WHERE status = 'committed'").fetchone()[0])

    def sample(self, key: str) -> SampleRow | None:
        """Look one committed sample up."""
        row = self._db.execute(f"{_SELECT} WHERE key = ? AND status = 'committed'", (key,)).fetchone()
        return _sample_row(row) if row else None

    def samples(self) -> Iterator[SampleRow]:
        """Go through all committed samples in the order of their bytes, without holding them in memory."""
        last_shard, last_row = "", 0
        while True:
            rows = self._db.execute(_NEXT_SAMPLES, (last_shard, last_row)).fetchall()
            if not rows:
                return
            for row in rows:
                yield _sample_row(row[:-1])
            last_shard, last_row = rows[-1][2], rows[-1][-1]

    def failures(self) -> dict[str, Failure]:
        query = "SELECT key, source, reason, detail, attempts, num_tokens FROM samples WHERE status = 'failed'"
        return {row[0]: Failure(*row) for row in self._db.execute(query)}

    def skips(self) -> list[SkipRow]:
        return [SkipRow(*row) for row in self._db.execute("SELECT source, reason, detail FROM skips ORDER BY rowid")]

    def events(self) -> list[str]:
        return [f"{at} {what}" for at, what in self._db.execute("SELECT at, what FROM events ORDER BY rowid")]


def _connect_read_only(path: Path) -> sqlite3.Connection:
    """Open for reading while another process writes; a folder that cannot be written has no writer either."""
    uri = path.absolute().as_uri()
    db = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=30)
    try:
        db.execute("SELECT count(*) FROM meta").fetchone()
    except sqlite3.OperationalError:
        db.close()  # WAL needs its -shm file, which cannot be made on read-only media
        if os.access(path.parent, os.W_OK):
            raise
        db = sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True, timeout=30)
    return db


_COLUMNS = "key, source, shard, num_tokens, loss_tokens, attempts, tensors"
_SELECT = f"SELECT {_COLUMNS} FROM samples"  # noqa: S608 - constants only
_NEXT_SAMPLES = (
    f"SELECT {_COLUMNS}, rowid FROM samples WHERE status = 'committed' AND (shard, rowid) > (?, ?) "  # noqa: S608
    "ORDER BY shard, rowid LIMIT 1000"
)


def _sample_row(row: tuple[str, str, str, int, int, int, bytes]) -> SampleRow:
    key, source, shard, num_tokens, loss_tokens, attempts, tensors = row
    try:
        found = msgspec.json.decode(tensors, type=list[TensorRecord])
    except msgspec.MsgspecError as error:
        raise StoreError(f"the index row of sample {key} is damaged ({error})", "run hsdump verify") from error
    record = SampleRecord(
        key=key,
        source=source,
        num_tokens=num_tokens,
        loss_tokens=loss_tokens,
        attempts=attempts,
        tensors=found,
    )
    return SampleRow(shard, record)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
