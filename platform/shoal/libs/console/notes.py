"""What people write about runs: notes, tags, and which are archived; in `$SHOAL_HOME/console.sqlite`.

They stay on this host: the record is the runs' own, and each is copied to the store as its run writes it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shoal.atomic_file import connect_private
from shoal.errors import ConfigError, RunError
from shoal.home import home

MAX_NOTE_CHARS = 10_000
MAX_TAGS = 20
MAX_TAG_CHARS = 40
_TABLE = """CREATE TABLE IF NOT EXISTS notes (
    run TEXT PRIMARY KEY, note TEXT NOT NULL, tags TEXT NOT NULL, archived INTEGER NOT NULL) WITHOUT ROWID"""


Tag = Annotated[str, Meta(pattern=r"\S", max_length=MAX_TAG_CHARS)]


class RunNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one run. archived: lists leave it out unless asked"""

    note: Annotated[str, Meta(max_length=MAX_NOTE_CHARS)] = ""
    tags: Annotated[tuple[Tag, ...], Meta(max_length=MAX_TAGS)] = ()
    archived: bool = False


def read_notes() -> dict[str, RunNote]:
    """By the id of the run; only those that were written."""
    with _connect() as connection:
        return _read(connection)


def _read(connection: sqlite3.Connection) -> dict[str, RunNote]:
    rows = connection.execute("SELECT run, note, tags, archived FROM notes")
    return {run: RunNote(note, tuple(json.loads(tags)), bool(archived)) for run, note, tags, archived in rows}


def change_note(run_id: str, changes: Mapping[str, Any]) -> RunNote:
    """Replace some fields of a run's note. Raises ConfigError for values that do not fit."""
    with _connect() as connection:
        connection.execute("BEGIN IMMEDIATE")
        before = _read(connection).get(run_id, RunNote())
        try:
            note = msgspec.convert({**msgspec.structs.asdict(before), **changes}, RunNote)
        except msgspec.ValidationError as error:
            raise ConfigError("note", changes, f"is no note, tags, or archived: {error}") from None
        note = msgspec.structs.replace(note, tags=tuple(dict.fromkeys(each.strip() for each in note.tags)))
        values = (run_id, note.note, json.dumps(note.tags), note.archived)
        connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?, ?, ?)", values)
        connection.execute("COMMIT")
    return note


def remove_notes(run_ids: Iterable[str]) -> None:
    with _connect() as connection:
        connection.executemany("DELETE FROM notes WHERE run = ?", [(each,) for each in run_ids])


@contextmanager
def _connect() -> Iterator[sqlite3.Connection]:
    path = home() / "console.sqlite"
    try:
        with closing(connect_private(path, isolation_level=None)) as connection:
            connection.execute(_TABLE)
            yield connection
    except sqlite3.Error as error:
        raise RunError(f"the notes of runs in {path} cannot be read or written: {error}") from error
