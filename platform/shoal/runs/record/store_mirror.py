"""Mirrors one run to the store while it is running, in a thread of the process that records it.

Owns the names and the format of what the store has of a run: its record, and its head, which says who writes the run,
when it last did, and which object has the record. Each change of a head is conditional: one writer wins. Called by the
recorder, where `$SHOAL_STORE` is set, and by `store_copies`, which reads the runs of other hosts. Never makes a caller
wait for the store, except `close`, and for a bounded time.
"""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Collection
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
from msgspec import structs

from shoal.atomic_file import is_newer_format
from shoal.errors import RunError
from shoal.runs.record.database import BUSY_TIMEOUT_S, SCHEMA_VERSION, TABLES, record_path, translate_read_errors
from shoal.runs.run_status import Status
from shoal.store import Mirror, Store, open_shared_store

HEAD_FORMAT = 1
HEADS = "run-heads"  # one listing shows all runs, however many objects their checkpoints have
_HEAD_SUFFIX = ".json"
TOUCH_INTERVAL_S = 5.0  # at most two of the recorder's heartbeats
RECORD_INTERVAL_S = 10.0
MAX_SHARE = 0.05  # of the time that may go into records: those of long runs are written less often
CLOSE_TIMEOUT_S = 10.0
FILES = ("spec.yaml", "pictures/*", "tracking-*.json")  # of the run's folder: what a report and followers read
MAX_FILE_BYTES = 4 << 20

_log = logging.getLogger(__name__)


class RunHead(msgspec.Struct, frozen=True, kw_only=True):
    """`run-heads/ID.json`.

    writer:   a random token of the process that records the run
    status:   that of the record
    record:   the key of the record, of this incarnation or, until it is written, of the one before
    revision: counts the records of an incarnation
    beat:     differs each time
    """

    format: int = HEAD_FORMAT
    id: str
    host: str
    pid: int
    incarnation: int
    writer: str
    status: str
    record: str = ""
    revision: int = 0
    beat: int = 0
    is_removed: bool = False

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self)


class _Format(msgspec.Struct):
    format: int


class Superseded(RunError):
    """The run is another process's now, or was removed."""


def head_key(run_id: str) -> str:
    return f"{HEADS}/{run_id}{_HEAD_SUFFIX}"


def parse_head_key(key: str) -> str:
    """The run of a head; "" for another key."""
    return key.removeprefix(f"{HEADS}/").removesuffix(_HEAD_SUFFIX) if key.endswith(_HEAD_SUFFIX) else ""


def record_folder(run_id: str) -> str:
    return f"runs/{run_id}/record"


def record_key(run_id: str, incarnation: int) -> str:
    """Each incarnation has its own: a process that was taken for dead overwrites nothing of the next one."""
    return f"{record_folder(run_id)}/{incarnation:06d}.sqlite.z"


def read_head(store: Store, run_id: str) -> RunHead:
    """Raises FileNotFoundError, StoreError, and RunError for a head that is damaged or of a newer format."""
    return decode_head(run_id, store.read(head_key(run_id)))


def change_head(store: Store, run_id: str, writers: Collection[str], change: Callable[[RunHead], RunHead]) -> None:
    """Replace the head of a run that one of `writers` records: of several processes that do so at once, one succeeds.

    Raises Superseded where another one records it, or it was removed; KeyChanged; and as `read_head`.
    """
    tagged = store.read_tagged(head_key(run_id))
    head = decode_head(run_id, tagged.payload)
    if head.is_removed:
        raise Superseded(f"run {run_id!r} was removed from the store")
    if head.writer not in writers:
        other = f"process {head.pid} on {head.host}"
        raise Superseded(f"run {run_id!r} is another process's in the store ({other}), which resumed it")
    store.replace(head_key(run_id), change(head).to_bytes(), tagged.tag)


def decode_head(run_id: str, payload: bytes) -> RunHead:
    """Raises RunError for a head that is damaged or of a newer format."""
    try:
        reject_newer_format(run_id, msgspec.json.decode(payload, type=_Format).format, HEAD_FORMAT)
        head = msgspec.json.decode(payload, type=RunHead)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RunError(f"{head_key(run_id)} in the store is damaged: {error}") from None
    if head.id != run_id:
        raise RunError(f"{head_key(run_id)} in the store is damaged: it is of the run {head.id!r}")
    return head


def reject_newer_format(run_id: str, found: int, known: int) -> None:
    """Raises RunError."""
    if is_newer_format(found, known):
        problem = f"was written to the store by a newer Shoal (format {found}; this one reads {known})"
        raise RunError(f"run {run_id!r} {problem}: upgrade Shoal")


class StoreMirror:
    """The mirror of one incarnation of a run. Every method may be called from any thread.

    writer:   this incarnation's token
    previous: tokens of incarnations before, separated by blanks, whose head may be taken over

    A long upload must not look like a dead process: heartbeats and records are mirrors of their own.

    | capacity                 | what blocks | who unblocks             | close()                            |
    |--------------------------|-------------|--------------------------|------------------------------------|
    | none: it reads the record | `close`    | the store, or 10 s       | mirrors the end once more, or logs |
    """

    def __init__(
        self, home: Path, url: str, run_id: str, number: int, incarnation: int, writer: str, previous: str
    ) -> None:
        self.problem = ""  # why this process may record the run no longer
        self._home = home
        self._url = url
        self._number = number
        self._head = RunHead(
            id=run_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            incarnation=incarnation,
            writer=writer,
            status=Status.RUNNING,
        )
        self._writers = {writer, *previous.split()}
        self._previous_record = ""  # of the incarnation before, until this one has its own
        self._lock = threading.Lock()  # guards _head; held for a request
        self._store: Store | None = None
        self._is_changed = True
        self._is_closed = False
        self._record_due_s = 0.0
        warning = f"run {run_id} goes on, but is not mirrored"
        beat, write = (partial(self._unless_superseded, each) for each in (self._beat, self._write_record))
        self._records = Mirror(f"record-{run_id}", write, retry_s=TOUCH_INTERVAL_S, warning=warning)
        self._heartbeats = Mirror(f"mirror-{run_id}", beat, TOUCH_INTERVAL_S, TOUCH_INTERVAL_S, warning)
        self._heartbeats.wake()

    def mark_changed(self) -> None:
        """The record has new rows."""
        self._is_changed = True

    def close(self) -> None:
        """Mirror the rest. A store that does not answer in time is logged. Idempotent."""
        self._is_changed = self._is_closed = True  # the end
        if not self._heartbeats.close(CLOSE_TIMEOUT_S):
            _log.warning("run %s: the store %s does not answer: it lacks the run's end", self._head.id, self._url)

    def _unless_superseded(self, act: Callable[[], bool]) -> bool:
        """False: there is nothing to mirror any more."""
        try:
            return act()
        except Superseded as error:
            self.problem = str(error)
            return False

    def _beat(self) -> bool:
        """Write the head, of a new run with its first record. False: the store is the folder of the record itself."""
        if self._store is None:
            if (store := open_shared_store(self._home, self._url)) is None:
                return False
            self._store = store.without_waiting()  # the next heartbeat is the next attempt
        if self._head.beat == 0:
            self._touch(self._store)  # before anything is written: it may be another's
        if self._is_closed:
            self._records.close()  # it may be uploading
        if self._is_closed or not self._head.record:
            self._write_record()
        elif self._is_changed and time.monotonic() >= self._record_due_s:
            self._records.wake()
        self._touch(self._store)
        return True

    def _write_record(self) -> bool:
        store, began_s = self._store, time.monotonic()
        if store is None or not self._is_changed:
            return True
        self._is_changed = False
        key = record_key(self._head.id, self._head.incarnation)
        try:
            status, payload = pack_record(self._home, self._number, self._head)
            store.write(key, payload)
        except BaseException:
            self._is_changed = True
            raise
        now_s = time.monotonic()
        self._record_due_s = now_s + max(RECORD_INTERVAL_S, (now_s - began_s) / MAX_SHARE)
        with self._lock:
            self._head = structs.replace(self._head, record=key, revision=self._head.revision + 1, status=status)
        if self._head.revision == 1:  # readers find the new record before those of earlier incarnations go
            self._touch(store)
            listed = store.list_entries(record_folder(self._head.id))
            store.delete(entry.key for entry in listed if entry.key < key)
        return True

    def _touch(self, store: Store) -> None:
        """Write the head: the time of its last change is the run's heartbeat. A run without one gets it with its first
        record. Raises Superseded."""
        run_id = self._head.id
        with self._lock:
            try:
                change_head(store, run_id, self._writers, self._make_beat)
            except FileNotFoundError:
                if self._head.beat:
                    raise Superseded(f"run {run_id!r} was removed from the store {self._url}") from None
                if self._head.record:
                    store.create(head_key(run_id), self._make_beat(self._head).to_bytes())

    def _make_beat(self, found: RunHead) -> RunHead:
        if not self._head.record:
            self._previous_record = found.record
        self._head = structs.replace(self._head, beat=self._head.beat + 1)
        return structs.replace(self._head, record=self._head.record or self._previous_record)


def pack_record(home: Path, number: int, head: RunHead) -> tuple[str, bytes]:
    """The status of a run, and its rows and small files as a compressed SQLite file. Raises Superseded, RunError.

    SQLite copies the rows, without Python's lock. Readers and writers of the record do not wait for it.
    """
    opened = sqlite3.connect(":memory:", timeout=BUSY_TIMEOUT_S, isolation_level=None)
    with closing(opened) as memory, translate_read_errors(home):
        memory.execute("ATTACH ? AS record", (str(record_path(home)),))
        memory.execute("BEGIN")
        own = "SELECT * FROM record.runs WHERE number = ? AND id = ? AND incarnation = ?"
        memory.execute(f"CREATE TABLE runs AS {own}", (number, head.id, head.incarnation))
        for table in TABLES:
            memory.execute(f"CREATE TABLE {table} AS SELECT * FROM record.{table} WHERE run = ?", (number,))
        memory.execute("CREATE TABLE files (path TEXT, payload BLOB)")
        folder = home / "runs" / head.id
        paths = [path for pattern in FILES for path in sorted(folder.glob(pattern)) if path.is_file()]
        small = [path for path in paths if path.stat().st_size <= MAX_FILE_BYTES]
        files = ((path.relative_to(folder).as_posix(), path.read_bytes()) for path in small)
        memory.executemany("INSERT INTO files VALUES (?, ?)", files)
        memory.execute("COMMIT")
        memory.execute("DETACH record")
        memory.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        row = memory.execute("SELECT status FROM runs").fetchone()
        if row is None:
            raise Superseded(f"run {head.id!r} was resumed by another process, or was removed")
        return row[0], zlib.compress(memory.serialize(), 1)
