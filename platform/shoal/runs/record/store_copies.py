"""Runs of other hosts, as copies in this host's record; the claim of one that is resumed here; removal from the store.

Called by the reader and the recorder, where `$SHOAL_STORE` is set. Never writes to a run of another process in the
store, and never compares two hosts' clocks: how old a heartbeat is, follows from times of the store alone.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import socket
import sqlite3
import threading
import time
import zlib
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path, PurePosixPath

from msgspec import structs

from shoal.atomic_file import make_folder, replace_synced
from shoal.errors import RunError, ShoalError, StoreError
from shoal.runs.record.database import SCHEMA_VERSION, TABLES, connect, delete_rows, transaction
from shoal.runs.record.store_mirror import (
    HEADS,
    RunHead,
    change_head,
    head_key,
    parse_head_key,
    read_head,
    reject_newer_format,
)
from shoal.runs.run_status import Status, resolve_status
from shoal.store import Entry, KeyChanged, Store, open_shared_store, store_url

REFRESH_TIMEOUT_S = 20.0  # a command waits so long for the store, then shows what is here
REFRESH_INTERVAL_S = 2.0  # in a process that polls
NUM_READERS = 8
_SETTLED_S = 3.0  # a bucket's times are in seconds: an object that is younger may change again within its second
_CLOCK = "now-"  # a key of the folder of heads, whose time is the store's present
_OLD_CLOCK_S = 3600.0  # of readers that were killed

_log = logging.getLogger(__name__)
_refreshes: dict[tuple[Path, str], tuple[threading.Thread, float]] = {}  # the last ones, and when by `time.monotonic`


def refresh(home: Path, *, force: bool = False) -> None:
    """Bring the copies of runs of other hosts up to date. Problems are logged: the record shows what it has.

    force: also when that was done a moment ago
    """
    url = store_url()
    before = _refreshes.get((home, url))
    if before and (before[0].is_alive() or (not force and time.monotonic() < before[1] + REFRESH_INTERVAL_S)):
        return
    worker = threading.Thread(target=_refresh, args=(home, url), name="refresh-runs", daemon=True)
    worker.start()
    worker.join(REFRESH_TIMEOUT_S)
    if worker.is_alive():
        _log.warning("the store %s has not answered for %.0f s: runs of other hosts may lack", url, REFRESH_TIMEOUT_S)
    _refreshes[home, url] = (worker, time.monotonic())


def _refresh(home: Path, url: str) -> None:
    try:
        if (store := open_shared_store(home, url)) is None:
            return
        store = store.without_waiting()
        listed, now_s = _list_heads(store)
        waiting: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        for entry in reversed(listed):  # ids begin with the time
            waiting.put(entry)
        args = (home, store, waiting, now_s)
        readers = [threading.Thread(target=_import_all, args=args, daemon=True) for _ in listed[:NUM_READERS]]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    except (ShoalError, OSError) as error:
        _log.warning("runs of other hosts are shown as they were: %s", error)


def _list_heads(store: Store) -> tuple[list[Entry], float]:
    """All heads, and the present by the clock of the store, in seconds since the epoch."""
    clock = f"{HEADS}/{_CLOCK}{secrets.token_hex(8)}"
    store.write(clock, b"")
    listed = store.list_entries(HEADS)
    now_s = next((entry.modified_s for entry in listed if entry.key == clock), None)
    if now_s is None:
        raise StoreError(f"{store.url} does not list what was written to it: it is no store for several hosts")
    others = [entry for entry in listed if not parse_head_key(entry.key)]
    store.delete(entry.key for entry in others if entry.key == clock or now_s - entry.modified_s > _OLD_CLOCK_S)
    return [entry for entry in listed if parse_head_key(entry.key)], now_s


def _import_all(home: Path, store: Store, waiting: queue.SimpleQueue[Entry], now_s: float) -> None:
    with closing(connect(home)) as connection:
        while True:
            try:
                entry = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                _import(connection, home, store, entry, now_s)
            except (ShoalError, OSError) as error:
                _log.warning("run %s of the store is not shown as it is: %s", parse_head_key(entry.key), error)


def _import(connection: sqlite3.Connection, home: Path, store: Store, entry: Entry, now_s: float) -> None:
    run_id, age_s = parse_head_key(entry.key), max(0.0, now_s - entry.modified_s)
    row = connection.execute("SELECT * FROM runs WHERE id = ?", (run_id,)).fetchone()
    if row is not None and row["head_at"] == entry.modified_s:
        _set_heartbeat(connection, run_id, age_s)
        return
    try:
        head = read_head(store, run_id)
    except FileNotFoundError:  # removed meanwhile
        return
    head_at = entry.modified_s if age_s > _SETTLED_S else None
    if head.is_removed or (row is not None and not _is_newer(row, head)):
        connection.execute("UPDATE runs SET head_at = ? WHERE id = ?", (head_at, run_id))
    elif row is not None and (row["writer"], row["revision"]) == (head.writer, head.revision):
        _set_head(connection, head, head_at)
    elif head.record:
        # Replace a copy by the record in the store. Raises RunError for a damaged or newer one.
        payload = store.read(head.record)
        connection.execute("ATTACH ':memory:' AS copy")
        try:
            connection.deserialize(zlib.decompress(payload), name="copy")
            version = connection.execute("PRAGMA copy.user_version").fetchone()[0]
            reject_newer_format(head.id, version, SCHEMA_VERSION)
            if [row["id"] for row in connection.execute("SELECT id FROM copy.runs")] != [head.id]:
                raise RunError(f"{head.record} in {store.url} is damaged: it is of another run")
            files = [(row["path"], row["payload"]) for row in connection.execute("SELECT * FROM copy.files")]
            with transaction(connection):
                before = connection.execute("SELECT * FROM runs WHERE id = ?", (head.id,)).fetchone()
                if before is None or _is_newer(before, head):  # another command may have been faster
                    # A run keeps its number here; events get numbers in their order.
                    if before is not None:
                        delete_rows(connection, before["number"])
                    last = connection.execute("SELECT ifnull(max(number), 0) FROM runs").fetchone()[0]
                    number = last + 1 if before is None else before["number"]
                    _insert(connection, "runs", {"number": number})
                    for table in TABLES:
                        _insert(connection, table, {"run": number})
                    _set_head(connection, head, head_at)
        except (zlib.error, sqlite3.Error) as error:
            raise RunError(f"{head.record} in {store.url} is damaged: {error}") from None
        finally:
            connection.execute("DETACH copy")
        folder = home / "runs" / head.id
        make_folder(folder)
        for name, content in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise RunError(f"the record of run {head.id!r} in the store is damaged: it has a file {name!r}")
            replace_synced(folder / path, content)
    _set_heartbeat(connection, run_id, age_s)


def _is_newer(row: sqlite3.Row, head: RunHead) -> bool:
    """Whether the store knows more than the row: of a run of this host only if another has resumed it since."""
    if row["copied_from"] is None:
        is_resumed = row["writer"] is not None and head.writer not in row["writer"].split()
        return is_resumed and head.incarnation >= row["incarnation"] and resolve_status(row) is not Status.RUNNING
    return bool(head.incarnation >= row["incarnation"])


def _set_heartbeat(connection: sqlite3.Connection, run_id: str, age_s: float) -> None:
    """The age that the store knows, by the clock of this host, which alone reads it."""
    connection.execute(
        "UPDATE runs SET heartbeat_at = ? WHERE id = ? AND copied_from IS NOT NULL AND status = ?",
        (time.time() - age_s, run_id, Status.RUNNING),
    )


def _set_head(connection: sqlite3.Connection, head: RunHead, head_at: float | None) -> None:
    """What the head says of a copy. A run that was resumed may have no record yet but that of its last incarnation."""
    connection.execute(
        "UPDATE runs SET host = ?, copied_from = ?, pid = ?, incarnation = ?, writer = ?, revision = ?, head_at = ?"
        " WHERE id = ?",
        (head.host, head.host, head.pid, head.incarnation, head.writer, head.revision, head_at, head.id),
    )
    if head.status == Status.RUNNING:
        sql = "UPDATE runs SET status = ?, finished_at = NULL, error = NULL WHERE id = ?"
        connection.execute(sql, (head.status, head.id))


def _insert(connection: sqlite3.Connection, table: str, values: Mapping[str, int]) -> None:
    """Copy the columns that both sides have, some replaced by these values."""
    sides = [
        {row["name"] for row in connection.execute(f"PRAGMA {side}.table_info({table})")} for side in ("main", "copy")
    ]
    names = sorted(set.intersection(*sides) - values.keys() - ({"number"} if table == "events" else set()))
    into, chosen = ", ".join([*names, *values]), ", ".join([*names, *map(str, values.values())])
    connection.execute(f"INSERT INTO main.{table} ({into}) SELECT {chosen} FROM copy.{table} ORDER BY rowid")


def claim(home: Path, row: sqlite3.Row, writer: str) -> bool:
    """Make this process the writer of a run in the store, before it becomes that here: of several one succeeds.

    row: of `runs`, after a refresh

    False: the store is down or lacks the run, which is of this host. It is resumed, and its mirror claims it later.

    Raises RunError when another process has resumed or removed the run.
    """
    run_id, copied_from = row["id"], row["copied_from"]
    try:
        if (store := open_shared_store(home, store_url())) is None:
            return False
        own = {"host": socket.gethostname(), "pid": os.getpid(), "incarnation": row["incarnation"] + 1}

        def take_over(head: RunHead) -> RunHead:
            return structs.replace(head, **own, writer=writer, status=Status.RUNNING, revision=0)

        change_head(store, run_id, (row["writer"] or "").split(), take_over)
        return True
    except FileNotFoundError:
        if copied_from is not None:
            raise RunError(f"run {run_id!r} was removed from the store: it cannot be resumed") from None
    except KeyChanged:
        raise RunError(f"run {run_id!r} was resumed or removed by another process at the same time") from None
    except StoreError as error:
        if copied_from is not None:
            raise
        _log.warning("run %s is resumed without the store, which might know of another resumption: %s", run_id, error)
    return False


def remove_from_store(home: Path, run_id: str, writers: str) -> None:
    """Remove a run's record, checkpoints and head. A killed removal can be repeated.

    writers: the tokens that this host knows, separated by blanks

    Raises RunError when another process has resumed it since, and StoreError.
    """
    if (store := open_shared_store(home, store_url())) is None:
        return
    try:
        head = read_head(store, run_id)
    except FileNotFoundError:
        return
    except RunError as error:
        raise RunError(f"{error}; remove the object to remove the run") from None
    if not head.is_removed:
        try:  # from now on no process can resume it
            change_head(store, run_id, writers.split(), lambda head: structs.replace(head, is_removed=True))
        except KeyChanged:
            raise RunError(f"run {run_id!r} was changed in the store at the same time: try again") from None
    store.delete(entry.key for entry in store.list_entries(f"runs/{run_id}"))
    store.delete([head_key(run_id)])
