"""The file of a run's sessions: what was opened, sampled and answered, how each ended, and what became of its tokens.

A write is on the disk when it returns (`PRAGMA synchronous=FULL`). Writes that come while one is under way are one
transaction. The thread of the file is the only one that writes; `read` opens a connection of its own.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from shoal.atomic_file import connect_private, describe_newer_format, is_newer_format
from shoal.errors import RunError

FILE_NAME = "sessions.sqlite"  # in a run's folder
FORMAT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, key BLOB, opened_at REAL, opening BLOB, token_key TEXT, group_name TEXT,
    state TEXT DEFAULT 'open', why TEXT DEFAULT '', ending BLOB, ended_at REAL, rewards BLOB DEFAULT '{}',
    step INTEGER, advantage REAL
);
CREATE INDEX IF NOT EXISTS by_step ON sessions (step);
CREATE TABLE IF NOT EXISTS steps (number INTEGER PRIMARY KEY, state TEXT);
CREATE UNIQUE INDEX IF NOT EXISTS by_token_key ON sessions (token_key) WHERE token_key != '';
CREATE TABLE IF NOT EXISTS turns (session TEXT, number INTEGER, reply TEXT, turn BLOB, PRIMARY KEY (session, number));
CREATE TABLE IF NOT EXISTS answers (
    session TEXT, request BLOB, head BLOB, body BLOB, PRIMARY KEY (session, request)
);
CREATE TABLE IF NOT EXISTS counts (
    what TEXT, version INTEGER, tokens INTEGER, sessions INTEGER, PRIMARY KEY (what, version)
);
"""
_COUNT = (
    "INSERT INTO counts VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens,"
    " sessions = sessions + excluded.sessions"
)


class Statement(NamedTuple):
    """An SQL statement and its values."""

    sql: str
    values: Sequence[Any]


class _Write(NamedTuple):
    statements: Sequence[Statement]
    loop: asyncio.AbstractEventLoop
    written: asyncio.Future[None]


def count(what: str, version: int, num_tokens: int, num_sessions: int = 0) -> Statement:
    """Add to an account: `sampled`, `learned` or the reason of a drop, by the version that sampled the tokens."""
    return Statement(_COUNT, (what, version, num_tokens, num_sessions))


class SessionStore:
    """The sessions of one run, in `folder`. Raises RunError for a file of a later release."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self._database = connect_private(self.path, check_same_thread=False, isolation_level=None)
        found = self._database.execute("PRAGMA user_version").fetchone()[0]
        if is_newer_format(found, FORMAT):
            raise RunError(describe_newer_format(self.path, found, FORMAT))
        self._database.executescript(
            f"PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA user_version={FORMAT}; {_SCHEMA}"
        )
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="session-store", daemon=True)
        self._thread.start()

    async def write(self, *statements: Statement) -> None:
        """Return when all are on the disk. Raises sqlite3.Error: none is."""
        loop = asyncio.get_running_loop()
        written = loop.create_future()
        self._writes.put(_Write(statements, loop, written))
        await written

    def write_first(self, *statements: Statement) -> None:
        """Write before any other thread does. Raises sqlite3.Error."""
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            for statement in statements:
                self._database.execute(statement.sql, statement.values)

    def read(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows of a query, from any thread."""
        return read_sessions(self.path, sql, *values)

    def close(self) -> None:
        """Write what waits, and close the file. Idempotent."""
        if self._thread.is_alive():
            self._writes.put(None)
            self._thread.join()
            self._database.close()

    def _write_all(self) -> None:
        for writes in self._take_rounds():
            try:
                with self._database:
                    self._database.execute("BEGIN IMMEDIATE")
                    for write in writes:
                        for statement in write.statements:
                            self._database.execute(statement.sql, statement.values)
            except sqlite3.Error as error:
                for write in writes:
                    write.loop.call_soon_threadsafe(_fail, write.written, error)
            else:
                for write in writes:
                    write.loop.call_soon_threadsafe(_succeed, write.written)

    def _take_rounds(self) -> Iterator[list[_Write]]:
        while (first := self._writes.get()) is not None:
            writes = [first]
            is_last = False
            while not self._writes.empty():
                write = self._writes.get()
                is_last = write is None
                if write is None:
                    break
                writes.append(write)
            yield writes
            if is_last:
                return


def read_sessions(path: Path, sql: str, *values: object) -> list[tuple[Any, ...]]:
    """The rows of a query on the file of a run's sessions, which may be in use."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        return database.execute(sql, values).fetchall()


def _succeed(written: asyncio.Future[None]) -> None:
    if not written.done():
        written.set_result(None)


def _fail(written: asyncio.Future[None], error: Exception) -> None:
    if not written.done():
        written.set_exception(error)
