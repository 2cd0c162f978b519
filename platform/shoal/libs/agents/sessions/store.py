"""The file of a run's sessions: what was opened, sampled and answered, how each ended, and what became of its tokens.

A write is on the disk when it returns (`PRAGMA synchronous=FULL`). Writes that come while one is under way are one
transaction. One thread writes; readings have another connection, so that other processes may read as well.
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

import msgspec

from shoal.atomic_file import connect_private, describe_newer_format, is_newer_format
from shoal.errors import InferenceError, RunError
from shoal.libs.agents.sessions.session import AgentSession, Ending, Opening
from shoal.libs.agents.sessions.token_tree import TokenTree, Turn

FILE_NAME = "sessions.sqlite"  # in a run's folder
TOKENIZER = "tokenizer.json"  # beside it: its texts can be read without the model
FORMAT = 1
DISK_PAUSE_S = 2.0  # before a client repeats its request
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, key BLOB, opened_at REAL, opening BLOB, token_key TEXT, group_name TEXT,
    state TEXT DEFAULT 'open', why TEXT DEFAULT '', ending BLOB, end_time REAL, rewards BLOB DEFAULT '{}',
    step INTEGER, advantage REAL, deviation REAL DEFAULT 1
);
CREATE INDEX IF NOT EXISTS by_step ON sessions (step);
CREATE INDEX IF NOT EXISTS by_group ON sessions (group_name);
CREATE UNIQUE INDEX IF NOT EXISTS by_token_key ON sessions (token_key) WHERE token_key != '';
CREATE TABLE IF NOT EXISTS steps (number INTEGER PRIMARY KEY, state TEXT);
CREATE TABLE IF NOT EXISTS turns (session TEXT, number INTEGER, reply TEXT, turn BLOB, PRIMARY KEY (session, number));
CREATE TABLE IF NOT EXISTS answers (
    session TEXT, request BLOB, head BLOB, body BLOB, PRIMARY KEY (session, request)
);
CREATE TABLE IF NOT EXISTS counts (what TEXT, version INTEGER, tokens INTEGER, PRIMARY KEY (what, version));
"""
_COLUMNS = "id, key, opened_at, opening, group_name, state, why, ending, end_time, rewards, step, advantage, deviation"
_COUNT = "INSERT INTO counts VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens"


class Statement(NamedTuple):
    """An SQL statement and its values."""

    sql: str
    values: Sequence[Any]


class _Write(NamedTuple):
    statements: Sequence[Statement]
    loop: asyncio.AbstractEventLoop
    written: asyncio.Future[None]


# -- what is written ----------------------------------------------------------------------------------------------


def insert_session(session: AgentSession, token_key: str) -> Statement:
    """A session that is opened. token_key: the idempotency key of its opening; "" for none"""
    opening = msgspec.json.encode(session.opening)
    values = (session.id, session.key, session.opened_at, opening, token_key, session.group)
    return Statement(
        "INSERT INTO sessions (id, key, opened_at, opening, token_key, group_name) VALUES (?, ?, ?, ?, ?, ?)", values
    )


def change_session(session_id: str, **columns: object) -> Statement:
    """Other values of some columns."""
    names = ", ".join(f"{name} = ?" for name in columns)
    return Statement(f"UPDATE sessions SET {names} WHERE id = ?", (*columns.values(), session_id))


def insert_record(session_id: str, reply: str, record: Turn) -> Statement:
    """A record. reply: the id of the answer that brought it"""
    return Statement(
        "INSERT INTO turns VALUES (?, ?, ?, ?)", (session_id, record.id, reply, msgspec.msgpack.encode(record))
    )


def insert_answer(session_id: str, request: bytes, head: bytes, body: bytes) -> Statement:
    """The answer to a request, for who asks again."""
    return Statement("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", (session_id, request, head, body))


def delete_answers(session_id: str) -> Statement:
    """Nobody asks again: the session is over."""
    return Statement("DELETE FROM answers WHERE session = ?", (session_id,))


def insert_step(number: int) -> Statement:
    return Statement("INSERT INTO steps VALUES (?, 'open')", (number,))


def close_step(number: int) -> Statement:
    """The learner is through with it."""
    return Statement("UPDATE steps SET state = 'closed' WHERE number = ?", (number,))


def renumber_step(number: int, another: int) -> tuple[Statement, ...]:
    """The segments of a step are queued again, as another one."""
    return (
        Statement("UPDATE sessions SET step = ? WHERE step = ?", (another, number)),
        Statement("UPDATE steps SET state = 'lost' WHERE number = ?", (number,)),
        insert_step(another),
    )


def count(what: str, version: int, num_tokens: int) -> Statement:
    """Add to an account: `sampled`, `learned` or the reason of a drop, by the version that sampled the tokens."""
    return Statement(_COUNT, (what, version, num_tokens))


class SessionStore:
    """The sessions of one run, in `folder`. Raises RunError for a file of a later release."""

    def __init__(self, folder: Path) -> None:
        self.records = SessionRecords(folder)
        path = self.records.path
        self._database = connect_private(path, check_same_thread=False, isolation_level=None)
        found = self._database.execute("PRAGMA user_version").fetchone()[0]
        if is_newer_format(found, FORMAT):
            raise RunError(describe_newer_format(path, found, FORMAT))
        self._database.executescript(
            f"PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA user_version={FORMAT}; {_SCHEMA}"
        )
        self.records.open()
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="session-store", daemon=True)
        self._thread.start()

    async def write(self, *statements: Statement) -> None:
        """Return when all are on the disk. Raises InferenceError (503): none is, since the disk takes nothing now."""
        loop = asyncio.get_running_loop()
        written = loop.create_future()
        self._writes.put(_Write(statements, loop, written))
        try:
            await written
        except sqlite3.Error as error:
            problem = f"the run's disk takes nothing now: {error}"
            raise InferenceError(503, problem, retry_after_s=DISK_PAUSE_S) from error

    def write_first(self, *statements: Statement) -> None:
        """Write before any other thread does. Raises sqlite3.Error."""
        self._execute(statements)

    def close(self) -> None:
        """Write what waits, and close the file. Idempotent."""
        if self._thread.is_alive():
            self._writes.put(None)
            self._thread.join()
            self.records.close()
            self._database.close()

    def _execute(self, statements: Sequence[Statement]) -> None:
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            for statement in statements:
                self._database.execute(statement.sql, statement.values)

    def _write_all(self) -> None:
        for writes in self._take_rounds():
            problem = None
            try:
                self._execute([statement for write in writes for statement in write.statements])
            except sqlite3.Error as error:
                problem = error
            for write in writes:
                write.loop.call_soon_threadsafe(_finish, write.written, problem)

    def _take_rounds(self) -> Iterator[list[_Write]]:
        while (first := self._writes.get()) is not None:
            writes = [first]
            is_last = False
            while not self._writes.empty() and not is_last:
                write = self._writes.get()
                if write is None:
                    is_last = True
                else:
                    writes.append(write)
            yield writes
            if is_last:
                return


def _finish(written: asyncio.Future[None], error: Exception | None) -> None:
    if written.done():
        return
    if error is None:
        written.set_result(None)
    else:
        written.set_exception(error)


class SessionRecords:
    """Reads the sessions in a run's folder, also while the run is on; from any thread or process.

    Between `open` and `close` the readings share a connection: to connect takes ten times as long as to read.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self._database: sqlite3.Connection | None = None

    def open(self) -> None:
        self._database = self._connect()

    def close(self) -> None:
        """Idempotent."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, check_same_thread=False)

    def find(self, session_id: str) -> AgentSession | None:
        return next(iter(self._select("id = ?", session_id)), None)

    def find_by_token_key(self, token_key: str) -> AgentSession | None:
        """The session that was opened with this idempotency key."""
        return next(iter(self._select("token_key = ?", token_key)), None)

    def list_all(self) -> list[AgentSession]:
        """In the order of their opening."""
        return self._select("TRUE ORDER BY opened_at")

    def list_unassigned(self) -> list[AgentSession]:
        """Those that no step has taken."""
        return self._select("step IS NULL")

    def list_last(self, num: int) -> list[AgentSession]:
        """The last ones, in the order of their ends."""
        return self._select("state = 'ended' ORDER BY end_time DESC LIMIT ?", num)[::-1]

    def has_group(self, name: str) -> bool:
        """Whether the group has, or had, a session."""
        return bool(self._read("SELECT 1 FROM sessions WHERE group_name = ? LIMIT 1", name))

    def count_sessions(self) -> dict[str, int]:
        """Sessions by their states, all of them as `opened`, their answers, and steps that were learnt."""
        states = dict(self._read("SELECT state, count(*) FROM sessions WHERE state != 'open' GROUP BY state"))
        others = "(SELECT count(*) FROM sessions), (SELECT count(*) FROM turns)"
        ((opened, answers, steps),) = self._read(
            f"SELECT {others}, (SELECT count(*) FROM steps WHERE state = 'closed')"
        )
        return states | {"opened": opened, "answers": answers, "steps": steps}

    def list_of_step(self, number: int) -> list[AgentSession]:
        return self._select("step = ?", number)

    def list_open_steps(self) -> list[int]:
        """Steps that the learner is not through with, in order."""
        return [number for (number,) in self._read("SELECT number FROM steps WHERE state = 'open' ORDER BY number")]

    def find_last_step(self) -> int:
        """The highest number; 0 before the first."""
        return int(self._read("SELECT coalesce(max(number), 0) FROM steps")[0][0])

    def fill(self, session: AgentSession, tokenizer: Any = None) -> AgentSession:
        """The session with its turns."""
        session.tree = TokenTree(tokenizer)
        rows = self._read("SELECT turn FROM turns WHERE session = ?", session.id)
        session.tree.restore(msgspec.msgpack.decode(row[0], type=Turn) for row in rows)
        return session

    def find_answer(self, session_id: str, request: bytes) -> tuple[bytes, bytes] | None:
        """The head and the body of the answer to a request."""
        rows = self._read("SELECT head, body FROM answers WHERE session = ? AND request = ?", session_id, request)
        return (rows[0][0], rows[0][1]) if rows else None

    def find_record(self, session_id: str, reply: str) -> int | None:
        """The id of the turn, of several the last one, that the answer of this id has brought."""
        rows = self._read("SELECT max(number) FROM turns WHERE session = ? AND reply = ?", session_id, reply)
        return None if rows[0][0] is None else int(rows[0][0])

    def count_tokens(self) -> dict[str, dict[int, int]]:
        """The accounts: tokens by what became of them, and by version."""
        counts: dict[str, dict[int, int]] = {}
        for what, version, num_tokens in self._read("SELECT what, version, tokens FROM counts"):
            counts.setdefault(what, {})[version] = num_tokens
        return counts

    def _select(self, condition: str, *values: object) -> list[AgentSession]:
        sessions = []
        for row in self._read(f"SELECT {_COLUMNS} FROM sessions WHERE {condition}", *values):
            name, key, opened_at, opening, group, state, why, ending, end_time, rewards, *rest = row
            opened = msgspec.json.decode(opening, type=Opening)
            ended = None if ending is None else msgspec.json.decode(ending, type=Ending)
            by_turn = msgspec.json.decode(rewards, type=dict[int, float])
            sessions.append(
                AgentSession(name, key, opened_at, opened, group, state, why, ended, end_time, by_turn, *rest)
            )
        return sessions

    def _read(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        if self._database is not None:
            return self._database.execute(sql, values).fetchall()
        with closing(self._connect()) as database:
            return database.execute(sql, values).fetchall()
