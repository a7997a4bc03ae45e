"""What was answered so far, on disk the moment it arrives: the reason why nothing is asked twice.

One sqlite file beside the samples file. Each answer is one row in one transaction: after kill -9 it is there or it is
not, and the answers of a conversation that was broken off in the middle are used again.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsdump.errors import StoreBusy, StoreCorrupt, StoreError, StoreMismatch
from hsdump.locks import AliveLock

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (settings TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS questions (
    key BLOB PRIMARY KEY, place INTEGER NOT NULL, source TEXT NOT NULL, run TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS places ON questions (run, place);
CREATE TABLE IF NOT EXISTS answers (
    key BLOB, number INTEGER, turn INTEGER, prompt_ids BLOB NOT NULL, output_ids BLOB NOT NULL, finish TEXT NOT NULL,
    is_last INTEGER NOT NULL, PRIMARY KEY (key, number, turn)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS failures (
    key BLOB, number INTEGER, reason TEXT NOT NULL, detail TEXT NOT NULL, PRIMARY KEY (key, number)) WITHOUT ROWID;
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Answer:
    """One answer as the server gave it."""

    prompt_ids: NDArray[np.int32]
    """[P] what was asked, generation prompt included."""

    output_ids: NDArray[np.int32]
    """[A] what the target sampled, its end token included when it came to one."""

    finish: str
    """`stop`, or `length` when it was cut."""

    is_last: bool
    """Nothing of this conversation is left to ask."""


class Journal:
    """The answers to all questions. One process at a time; use from one thread."""

    def __init__(self, path: Path, settings: dict[str, Any], run: str) -> None:
        """Open, or make.

        Args:
            path: the file.
            settings: what made the answers; those of an existing file must be the same.
            run: names this run; the samples are those of its questions.

        Raises:
            StoreBusy: another process is answering into it.
            StoreMismatch: it holds answers made with other settings.
            StoreCorrupt: it is no such file, or it is damaged.
            StoreError: it cannot be written.
        """
        self.path, self._run, self._place = path, run, 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = AliveLock(path.with_name(path.name + ".lock"))
        except BlockingIOError as error:
            raise StoreBusy(f"another process is writing {path}", "wait for it, or choose another --out") from error
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error.strerror}", "choose another --out") from error
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._begin(settings)
        except sqlite3.DatabaseError as error:
            self._lock.release()
            raise StoreCorrupt(f"{path} cannot be read: {error}", "move it away: all will be asked again") from error
        except BaseException:
            self._lock.release()
            raise

    def _begin(self, settings: dict[str, Any]) -> None:
        # WAL: a transaction is one append. Without fsync a power cut may cost the last answers, a kill nothing.
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(_SCHEMA)
        row = self._db.execute("SELECT settings FROM meta").fetchone()
        if row is None:
            self._db.execute("INSERT INTO meta VALUES (?)", (json.dumps(settings, sort_keys=True),))
            return
        before = json.loads(row[0])
        differing = [name for name in {**before, **settings} if before.get(name) != settings.get(name)]
        if differing:
            lines = "; ".join(f"{name} was {before.get(name)}, is {settings.get(name)}" for name in sorted(differing))
            raise StoreMismatch(
                f"{self.path} holds answers made with other settings: {lines}",
                "use the same settings, or choose another --out",
            )

    def add_question(self, key: str, source: str) -> bool:
        """Give a question its place in this run; False when the run has it already."""
        blob = bytes.fromhex(key)
        known = self._db.execute("SELECT run FROM questions WHERE key = ?", (blob,)).fetchone()
        if known is not None and known[0] == self._run:
            return False
        self._place += 1
        self._db.execute("INSERT OR REPLACE INTO questions VALUES (?, ?, ?, ?)", (blob, self._place, source, self._run))
        return True

    def add_answer(self, key: str, number: int, turn: int, answer: Answer) -> None:
        """Keep one answer for good."""
        values = (answer.prompt_ids.tobytes(), answer.output_ids.tobytes(), answer.finish, answer.is_last)
        self._db.execute("BEGIN")
        self._db.execute(
            "INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)", (bytes.fromhex(key), number, turn, *values)
        )
        self._db.execute("DELETE FROM failures WHERE key = ? AND number = ?", (bytes.fromhex(key), number))
        self._db.execute("COMMIT")

    def end_early(self, key: str, number: int) -> None:
        """Say that what the conversation still asks for cannot be asked."""
        self._db.execute(
            "UPDATE answers SET is_last = 1 WHERE key = ?1 AND number = ?2 AND turn = "
            "(SELECT max(turn) FROM answers WHERE key = ?1 AND number = ?2)",
            (bytes.fromhex(key), number),
        )

    def add_failure(self, key: str, number: int, reason: str, detail: str) -> None:
        """Keep why there is no answer."""
        values = (bytes.fromhex(key), number, reason, detail)
        self._db.execute("INSERT OR REPLACE INTO failures VALUES (?, ?, ?, ?)", values)

    def failure(self, key: str, number: int) -> str | None:
        """Give the reason of a failure of an earlier run."""
        query = "SELECT reason FROM failures WHERE key = ? AND number = ?"
        row = self._db.execute(query, (bytes.fromhex(key), number)).fetchone()
        return None if row is None else str(row[0])

    def is_done(self, key: str, number: int) -> bool:
        """Tell whether nothing of this conversation is left to ask."""
        query = "SELECT 1 FROM answers WHERE key = ? AND number = ? AND is_last"
        return self._db.execute(query, (bytes.fromhex(key), number)).fetchone() is not None

    def answers(self, key: str, number: int) -> list[Answer]:
        """Give the answers of one conversation, in order."""
        query = "SELECT prompt_ids, output_ids, finish, is_last FROM answers WHERE key = ? AND number = ? ORDER BY turn"
        return [_answer(row) for row in self._db.execute(query, (bytes.fromhex(key), number))]

    def conversations(self, num_answers: int) -> Iterator[tuple[str, int, list[Answer]]]:
        """Give the answered conversations of this run's questions, in the order of the input, with their sources."""
        query = "SELECT key, source FROM questions WHERE run = ? ORDER BY place"
        for blob, source in self._db.execute(query, (self._run,)):
            for number in range(num_answers):
                found = self.answers(blob.hex(), number)
                if found:
                    yield source, number, found

    def close(self) -> None:
        """Let another process in."""
        self._db.close()
        self._lock.release()


def _answer(row: tuple[bytes, bytes, str, int]) -> Answer:
    prompt_ids, output_ids = (np.frombuffer(blob, dtype="<i4") for blob in row[:2])
    return Answer(prompt_ids=prompt_ids, output_ids=output_ids, finish=row[2], is_last=bool(row[3]))
