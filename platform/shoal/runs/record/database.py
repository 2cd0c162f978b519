"""The tables of the run record: one SQLite file for all runs, written by many processes and read by any.

Owns the schema, connections and transactions. Called by the recorder and the reader; knows nothing of runs' meaning.

With write-ahead logging, readers do not wait for a run that writes, and committed rows outlive a kill -9 of the writer.
SQLite has no NaN: a metric that is not a number is stored as NULL and read back as NaN.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from shoal.atomic_file import connect_private, describe_newer_format
from shoal.errors import RecordUnwritable, RunError
from shoal.home import file_lock

BUSY_TIMEOUT_S = 10.0
SCHEMA_VERSION = 1
TABLES = ("events", "metrics", "summaries", "versions", "models", "endpoints")  # besides `runs`; their column `run`

# Times are seconds since the epoch. `summaries` repeats the newest value and the finite extremes of each metric, so
# that polling a run and listing runs cost the number of metrics and not the length of the run. Of runs on a store,
# `writer` has the tokens that the run's head may have; `copied_from` the host that records the run, NULL for this one;
# `revision` that of the copied record; `head_at` when the head that was read was written, by the store's clock.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, job TEXT NOT NULL, status TEXT NOT NULL, spec TEXT NOT NULL,
    command TEXT NOT NULL, git_revision TEXT, git_dirty INTEGER NOT NULL, created_at REAL NOT NULL, finished_at REAL,
    host TEXT NOT NULL, pid INTEGER NOT NULL, heartbeat_at REAL NOT NULL, incarnation INTEGER NOT NULL, error TEXT,
    kind TEXT, writer TEXT, copied_from TEXT, revision INTEGER, head_at REAL, owner TEXT);
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY, run INTEGER NOT NULL, time REAL NOT NULL, kind TEXT NOT NULL, details TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS events_of_run ON events (run, number);
CREATE TABLE IF NOT EXISTS metrics (
    run INTEGER NOT NULL, step INTEGER NOT NULL, name TEXT NOT NULL, time REAL NOT NULL, value REAL,
    PRIMARY KEY (run, step, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS summaries (
    run INTEGER NOT NULL, name TEXT NOT NULL, step INTEGER NOT NULL, time REAL NOT NULL, value REAL,
    lowest REAL, highest REAL, PRIMARY KEY (run, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS versions (
    run INTEGER NOT NULL, version INTEGER NOT NULL, step INTEGER NOT NULL, time REAL NOT NULL, sha256 TEXT NOT NULL,
    PRIMARY KEY (run, version)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS models (
    run INTEGER NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, time REAL NOT NULL, aliases TEXT NOT NULL,
    PRIMARY KEY (run, name, version)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS endpoints (
    run INTEGER NOT NULL, name TEXT NOT NULL, kind TEXT NOT NULL, address TEXT NOT NULL, state TEXT NOT NULL,
    time REAL NOT NULL, PRIMARY KEY (run, name)) WITHOUT ROWID;
"""


def record_path(home: Path) -> Path:
    """The file of the record."""
    return home / "runs.sqlite"


def connect(home: Path) -> sqlite3.Connection:
    """A connection to the record in `home`, created if absent. Raises RunError when it cannot be opened.

    The caller closes it. Any thread may use it, one at a time.
    """
    path = record_path(home)
    connection: sqlite3.Connection | None = None
    try:
        connection = connect_private(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA synchronous = NORMAL")  # a power cut may lose the newest commits, a kill none
        version = _read_schema_version(connection)
        if version == 0:  # one after the other: SQLite rejects a second change of the journal mode without waiting
            with file_lock(home / "runs.lock", BUSY_TIMEOUT_S):
                if _read_schema_version(connection) == 0:
                    connection.execute("PRAGMA journal_mode = WAL")
                    with transaction(connection):
                        for statement in _SCHEMA.split(";"):
                            connection.execute(statement)
                        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    except (sqlite3.Error, OSError) as error:
        if connection is not None:
            connection.close()
        raise RunError(f"the run record {path} cannot be opened: {error}") from error
    if version > SCHEMA_VERSION:
        connection.close()
        raise RunError(describe_newer_format(path, version, SCHEMA_VERSION))
    return connection


@contextmanager
def read_connection(home: Path) -> Iterator[sqlite3.Connection]:
    """A connection for reading, closed at the end. Raises RunError when it cannot be opened or read."""
    with closing(connect(home)) as connection, translate_read_errors(home):
        yield connection


@contextmanager
def translate_read_errors(home: Path) -> Iterator[None]:
    """Turn the database's errors in the body, which reads, into RunError."""
    try:
        yield
    except sqlite3.Error as error:
        remedy = ": move it away, or put a copy in its place" if "malformed" in str(error) else ""
        raise RunError(f"the run record {record_path(home)} cannot be read: {error}{remedy}") from error


def _read_schema_version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def delete_rows(connection: sqlite3.Connection, number: int) -> None:
    """Delete a run from the record. Called in a transaction."""
    for table in TABLES:
        connection.execute(f"DELETE FROM {table} WHERE run = ?", (number,))
    connection.execute("DELETE FROM runs WHERE number = ?", (number,))


def list_run_ids(connection: sqlite3.Connection) -> list[str]:
    """Every run: first the copies of runs of other hosts, then those of this host, each oldest first."""
    sql = "SELECT id FROM runs ORDER BY copied_from IS NULL, created_at, number"
    return [row["id"] for row in connection.execute(sql)]


@contextmanager
def translate_write_errors() -> Iterator[None]:
    """Turn the database's errors in the body into RecordUnwritable."""
    try:
        yield
    except sqlite3.Error as error:
        remedy = ": free space where SHOAL_HOME lies" if "full" in str(error) else ""
        raise RecordUnwritable(f"the run record cannot be written: {error}{remedy}") from error


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of the body's writes, or none. Takes the write lock at once, so that the body's reads stay true.

    Raises RecordUnwritable when the database fails, or is locked for longer than BUSY_TIMEOUT_S.
    """
    with translate_write_errors():
        try:  # around BEGIN too: an interruption that came while it waited for the lock is raised when it has it
            connection.execute("BEGIN IMMEDIATE")
            yield
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
