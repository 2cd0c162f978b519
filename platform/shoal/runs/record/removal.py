"""Removing runs: their rows, and their folders with checkpoints, experience and drafts.

Called by the command line. Never removes a run in progress, nor registered models.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path

from shoal.errors import RunError
from shoal.home import home
from shoal.runs.record.database import connect, delete_rows, transaction, translate_write_errors
from shoal.runs.run_reader import Run
from shoal.runs.run_status import TERMINAL, Status, resolve_status

TRIAL_STARTED = "trial_started"  # the event of a run that starts another, and reads it at its end: `run_id`
_REMOVED = ".removed-"


def choose_old_runs(runs: Iterable[Run], keep: int, older_than_s: float, now: float) -> list[Run]:
    """The runs that retention removes: those that ended more than `older_than_s` ago, except the `keep` newest of all.

    A run in progress stays, and so do the trials of a running sweep: it reads them at its end. Runs of other
    hosts are not counted, and stay.
    """
    newest_first = sorted(
        (run for run in runs if run.copied_from is None), key=lambda run: run.created_at, reverse=True
    )
    going = [run for run in newest_first if not _is_over(run.status)]
    needed = {details["run_id"] for run in going for _, details in run.list_events(TRIAL_STARTED)}
    ended = [run for run in newest_first[keep:] if _is_over(run.status) and run.id not in needed]
    return [run for run in ended if now - (run.finished_at or run.heartbeat_at) > older_than_s]


def reject_running_runs(runs: Iterable[Run]) -> None:
    """Raises RunError for a running one."""
    for run in runs:
        _reject_running(run.status, run.id, run.pid, run.host)


def remove_runs(runs: Sequence[Run]) -> None:
    """Remove runs with their folders, and from the store where `$SHOAL_STORE` is set.

    Raises RunError, which names it, for a running one; it and the rest stay. Raises StoreError.
    """
    folder = home()
    with closing(connect(folder)) as connection:
        for run in runs:
            row = connection.execute("SELECT * FROM runs WHERE id = ?", (run.id,)).fetchone()
            if row is not None and os.environ.get("SHOAL_STORE"):
                from shoal.runs.record.store_copies import remove_from_store

                # First: a copy that remains is removed by the next attempt, one without it would come back.
                _reject_running(resolve_status(row), run.id, row["pid"], row["host"])
                remove_from_store(folder, run.id, row["writer"] or "")
            with transaction(connection):  # in which no process can resume the run
                row = connection.execute("SELECT * FROM runs WHERE id = ?", (run.id,)).fetchone()
                if row is not None:
                    _reject_running(resolve_status(row), run.id, row["pid"], row["host"])
                    delete_rows(connection, row["number"])
            # After the rows: a process that dies here leaves a folder without a run, which `remove_leftovers` takes.
            shutil.rmtree(run.folder, ignore_errors=True)


def list_leftovers() -> list[Path]:
    """The folders of runs that the record does not have."""
    folder = home()
    with closing(connect(folder)) as connection, transaction(connection):  # no run has a folder before it has its row
        return _find_leftovers(connection, folder)


def remove_leftovers() -> None:
    """Remove the folders of runs that the record does not have."""
    folder = home()
    with closing(connect(folder)) as connection:
        with transaction(connection):
            for path in _find_leftovers(connection, folder):
                with suppress(OSError):  # of another user
                    path.rename(path.with_name(f"{_REMOVED}{path.name.removeprefix(_REMOVED)}"))
        for path in (folder / "runs").glob(f"{_REMOVED}*"):
            shutil.rmtree(path, ignore_errors=True)


def vacuum() -> None:
    """Return the space of removed rows to the disk. Raises RecordUnwritable while another process writes for long."""
    with closing(connect(home())) as connection, translate_write_errors():
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _is_over(status: Status) -> bool:
    return status in TERMINAL or status is Status.LOST


def _reject_running(status: Status, run_id: str, pid: int, host: str) -> None:
    if not _is_over(status):
        raise RunError(f"run {run_id!r} is still {status.value} (process {pid} on {host}): stop it first")


def _find_leftovers(connection: sqlite3.Connection, folder: Path) -> list[Path]:
    known = {row["id"] for row in connection.execute("SELECT id FROM runs")}
    return [path for path in sorted((folder / "runs").glob("*")) if path.is_dir() and path.name not in known]
