"""What people write about runs: notes, tags, and which are archived; in `$SHOAL_HOME/console.sqlite`.

They stay on this host: the record is the runs' own, and each is copied to the store as its run writes it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from shoal.atomic_file import connect_private
from shoal.errors import ConfigError, RunError
from shoal.home import home

MAX_NOTE_CHARS = 10_000
MAX_TAGS = 20
MAX_TAG_CHARS = 40
_TABLE = """CREATE TABLE IF NOT EXISTS notes (
    run TEXT PRIMARY KEY, note TEXT NOT NULL, tags TEXT NOT NULL, archived INTEGER NOT NULL) WITHOUT ROWID"""


@dataclass(frozen=True)
class RunNote:
    """Of one run. archived: lists leave it out unless asked"""

    note: str = ""
    tags: tuple[str, ...] = ()
    archived: bool = False


def read_notes() -> dict[str, RunNote]:
    """By the id of the run; only those that were written."""
    with _connect() as connection:
        rows = connection.execute("SELECT run, note, tags, archived FROM notes").fetchall()
    return {run: RunNote(note, tuple(json.loads(tags)), bool(archived)) for run, note, tags, archived in rows}


def change_note(run_id: str, changes: Mapping[str, Any]) -> RunNote:
    """Replace some fields of a run's note. Raises ConfigError for values that do not fit."""
    checked = _check(changes)
    with _connect() as connection:
        connection.execute("BEGIN IMMEDIATE")
        row = connection.execute("SELECT note, tags, archived FROM notes WHERE run = ?", (run_id,)).fetchone()
        before = RunNote() if row is None else RunNote(row[0], tuple(json.loads(row[1])), bool(row[2]))
        note = replace(before, **checked)
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


def _check(changes: Mapping[str, Any]) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for name, value in changes.items():
        match name, value:
            case "note", str() if len(value) <= MAX_NOTE_CHARS:
                checked[name] = value
            case "tags", list() if len(value) <= MAX_TAGS and all(
                isinstance(each, str) and 0 < len(each.strip()) <= MAX_TAG_CHARS for each in value
            ):
                checked[name] = tuple(dict.fromkeys(each.strip() for each in value))
            case "archived", bool():
                checked[name] = value
            case _:
                remedy = f"a note of {MAX_NOTE_CHARS:,} letters, {MAX_TAGS} tags of {MAX_TAG_CHARS}, or archived"
                raise ConfigError(name, value, "is no part of a note", remedy)
    return checked
