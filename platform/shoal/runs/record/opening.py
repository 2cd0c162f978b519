"""Begins the record of a run, or resumes it: the one process that may record it is found here.

Called by jobs and pillars. Owns the claims: in the database, and before that in the store where `$SHOAL_STORE` is set.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ConfigError, RunError
from shoal.home import home
from shoal.runs.record.database import connect, transaction, translate_read_errors
from shoal.runs.record.provenance import command_line, find_owner, git_revision
from shoal.runs.record.recorder import INSERT_EVENT, RunRecorder, make_run_folder
from shoal.runs.record.serialization import escape_text, validate_text
from shoal.runs.run_kind import RunKind, infer_kind
from shoal.runs.run_reader import find_run_row, load
from shoal.runs.run_status import Status, resolve_status, transition
from shoal.runs.tracker import find_trackers, start_followers

if TYPE_CHECKING:
    from shoal.runs.record.store_mirror import StoreMirror

_CODE = re.compile(r"[\w./-]+\.py\b|[\w./-]+(?=:[A-Za-z_])")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def make_run_id() -> str:
    """An id by the time."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def create(
    job: str, spec: str, run_id: str | None = None, *, command: str | None = None, kind: RunKind | None = None
) -> RunRecorder:
    """Record a new run of `job` with `spec` (YAML), and start it.

    run_id:  names the run and its folder; made from the time when None
    command: what would start the run again; the command line of this process when None
    kind:    what the run does; inferred from the fields of its spec when None

    Raises ConfigError for an id that cannot name a folder, and for a tracker in `spec` without its library;
    RunError for an id in use, or an unwritable record.
    """
    now = time.time()
    run_id = run_id or make_run_id()
    if not _ID.fullmatch(run_id) or run_id == "latest":
        raise ConfigError("run_id", run_id, "cannot name a run", "use letters, digits, '.', '_' and '-', not 'latest'")
    revision, is_dirty = git_revision(Path.cwd())
    job = validate_text("job", job)
    spec = validate_text("spec", spec)
    command = escape_text(command or command_line())
    kind = kind or infer_kind(spec)
    trackers = find_trackers(spec)
    values = (run_id, job, Status.CREATED, spec, command, revision, is_dirty, kind, find_owner())
    writer = _make_writer() if os.environ.get("SHOAL_STORE") else None
    connection, folder = connect(home()), home() / "runs" / run_id
    try:
        with transaction(connection):
            if connection.execute("SELECT 1 FROM runs WHERE id = ?", (run_id,)).fetchone():
                raise RunError(f"there is a run {run_id!r} already: resume it, or choose another id")
            number = connection.execute(
                "INSERT INTO runs (id, job, status, spec, command, git_revision, git_dirty, kind, owner,"
                " created_at, heartbeat_at, host, pid, incarnation) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
                (*values, now, now, socket.gethostname(), os.getpid()),
            ).lastrowid
            assert number is not None
            incarnation = _claim_run(connection, number, is_resumed=False, writers=writer)
            make_run_folder(folder, spec)
        mirror = None if writer is None else _open_mirror(run_id, number, incarnation, writer, "")
    except BaseException:
        connection.close()
        raise
    followers = start_followers(run_id, folder, trackers)
    return RunRecorder(connection, number, run_id, incarnation, folder, mirror, followers, kind)


def reopen(ref: str, spec: str | None = None) -> RunRecorder:
    """Resume a run that ended or was lost: records the event `resumed` and closes its old endpoints.

    ref:  an id, the unique beginning of one, or `latest`
    spec: YAML that replaces the recorded spec; None keeps it

    Raises RunError when there is no such run, or when a living process still writes to it, also on another host.
    """
    spec = None if spec is None else validate_text("spec", spec)
    connection = connect(home())
    try:
        writer = previous = None
        if os.environ.get("SHOAL_STORE"):
            ref, writer, previous = _claim_in_store(connection, ref)
        with transaction(connection):  # in which no process can remove the run
            with translate_read_errors(home()):
                row = find_run_row(connection, ref)
            folder = home() / "runs" / row["id"]
            trackers = find_trackers(row["spec"] if spec is None else spec)
            writers = None if writer is None else f"{previous} {writer}".strip()
            incarnation = _claim_run(connection, row["number"], is_resumed=True, spec=spec, writers=writers)
            make_run_folder(folder, spec)
        mirror = None if writer is None else _open_mirror(row["id"], row["number"], incarnation, writer, previous or "")
    except BaseException:
        connection.close()
        raise
    followers = start_followers(row["id"], folder, trackers)
    kind = RunKind(row["kind"] or RunKind.OTHER)
    return RunRecorder(connection, row["number"], row["id"], incarnation, folder, mirror, followers, kind)


@contextmanager
def recording(
    spec: str, job: str, *, begun: str, kind: RunKind | None = None, resumed: str = "", run_id: str | None = None
) -> Iterator[RunRecorder]:
    """Record the run `resumed`, or a new one. The end of the body is the end of the run.

    Until the event `begun`, a resumed run's new `spec` (YAML) is provisional: if the run fails before, its record keeps
    the old spec, so that it can be resumed with other overrides. Raises RunError as `reopen` does.
    """
    if not resumed:
        with create(job, spec, run_id, kind=kind) as recorder:
            _record_code(recorder, spec)
            yield recorder
        return
    before = load(resumed).spec
    with reopen(resumed, spec) as recorder:
        _record_code(recorder, spec)
        try:
            yield recorder
        except Exception:  # a user's own code may raise anything
            with suppress(RunError):  # an unwritable record: the original error is reported
                if begun not in load(recorder.id).last_events(since_resumed=True):
                    recorder.change_spec(before)
            raise


def _record_code(recorder: RunRecorder, spec: str) -> None:
    """Record the SHA-256 of each file of code that a spec names, as in `game.py:make` or `game:Grid-v0`: runs are
    compared by it."""
    names = sorted({match[0] for match in _CODE.finditer(spec)})
    paths = [Path(name if name.endswith(".py") else f"{name.replace('.', '/')}.py") for name in names]
    files = [path for path in paths if path.is_file()]
    if files:
        details = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        recorder.record_event("code", **details)


def _make_writer() -> str:
    """A token. Raises ConfigError for an invalid `$SHOAL_STORE`."""
    from shoal.store import store_url

    store_url()
    return secrets.token_hex(8)


def _claim_in_store(connection: sqlite3.Connection, ref: str) -> tuple[str, str, str]:
    """Claim the run that `ref` names: its id, this writer's token, those that the store may have until it answers.

    Raises RunError when another process has resumed it.
    """
    from shoal.runs.record.store_copies import claim, refresh

    refresh(home(), force=True)
    with translate_read_errors(home()):
        row = find_run_row(connection, ref)
    _reject_running(row)
    writer = _make_writer()
    is_claimed = claim(home(), row, writer)
    return row["id"], writer, "" if is_claimed else row["writer"] or ""


def _open_mirror(run_id: str, number: int, incarnation: int, writer: str, previous: str) -> StoreMirror:
    from shoal.runs.record.store_mirror import StoreMirror
    from shoal.store import store_url

    return StoreMirror(home(), store_url(), run_id, number, incarnation, writer, previous)


def _reject_running(row: sqlite3.Row) -> Status:
    """The status of the run. Raises RunError if its writer is alive."""
    seen = resolve_status(row)
    if seen is Status.RUNNING:
        raise RunError(f"run {row['id']!r} is still running (process {row['pid']} on {row['host']}): stop it first")
    return seen


def _claim_run(
    connection: sqlite3.Connection,
    number: int,
    *,
    is_resumed: bool,
    spec: str | None = None,
    writers: str | None = None,
) -> int:
    """Make this process the writer of the run, and return its incarnation. Raises RunError if another writer is alive.

    Called in a transaction: readers see the new incarnation complete, and nothing of the old one as alive.

    writers: the tokens of this host that the run's head in the store may have; None without a store
    """
    now = time.time()
    host = socket.gethostname()
    pid = os.getpid()
    row = connection.execute("SELECT * FROM runs WHERE number = ?", (number,)).fetchone()
    seen = _reject_running(row)
    if writers is not None:  # the run is this host's from now on
        own = "UPDATE runs SET writer = ?, copied_from = NULL, revision = NULL, head_at = NULL WHERE number = ?"
        connection.execute(own, (writers, number))
    elif (copied_from := row["copied_from"]) is not None:
        raise RunError(f"run {row['id']!r} is a copy from {copied_from}: set SHOAL_STORE to its store to resume it")
    connection.execute(
        "UPDATE runs SET status = ?, finished_at = NULL, error = NULL, host = ?, pid = ?, heartbeat_at = ?,"
        " incarnation = incarnation + 1 WHERE number = ?",
        (transition(seen, Status.RUNNING), host, pid, now, number),
    )
    incarnation = int(row["incarnation"]) + 1
    if is_resumed:
        command = escape_text(command_line())
        details = json.dumps({"after": row["status"], "incarnation": incarnation, "command": command})
        connection.execute(INSERT_EVENT, (number, now, "resumed", details))
        connection.execute("UPDATE endpoints SET state = 'closed', time = ? WHERE run = ?", (now, number))
    if spec is not None:
        connection.execute("UPDATE runs SET spec = ? WHERE number = ?", (spec, number))
    return incarnation
