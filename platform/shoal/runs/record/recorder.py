"""The writing side of the run record.

Owns the row of one run, the thread that writes to it, and the run's folder. Called by jobs and pillars, from any
thread. Never reads metrics back, and never makes a caller of `log` wait for the disk.
"""

from __future__ import annotations

import json
import logging
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from shoal.atomic_file import create_private, make_folder
from shoal.errors import Closed, NotReached, RunError
from shoal.runs.event_messages import REGISTERED, format_warning
from shoal.runs.record import metric_summaries
from shoal.runs.record.database import BUSY_TIMEOUT_S, transaction, translate_write_errors
from shoal.runs.record.metric_mirror import LogEntry, MetricMirrors
from shoal.runs.record.provenance import mask_variables
from shoal.runs.record.serialization import (
    escape_text,
    to_json,
    validate_integer,
    validate_metric_name,
    validate_metrics,
    validate_text,
)
from shoal.runs.run_kind import RunKind
from shoal.runs.run_status import TERMINAL, Status, transition
from shoal.store import Mirror

if TYPE_CHECKING:
    from shoal.runs.ray_gauges import RunGauges
    from shoal.runs.record.store_mirror import StoreMirror
    from shoal.runs.tracker import RunFollowers

FLUSH_INTERVAL_S = 0.5
HEARTBEAT_INTERVAL_S = 3.0
MAX_PENDING = 50_000

_log = logging.getLogger(__name__)

_INSERT_METRIC = "INSERT OR REPLACE INTO metrics (run, step, name, time, value) VALUES (?, ?, ?, ?, ?)"
_INSERT_VERSION = "INSERT OR REPLACE INTO versions (run, version, step, time, sha256) VALUES (?, ?, ?, ?, ?)"
_END = "UPDATE runs SET status = ?, finished_at = ?, error = ? WHERE number = ?"
INSERT_EVENT = "INSERT INTO events (run, time, kind, details) VALUES (?, ?, ?, ?)"
_KIND = {INSERT_EVENT: 2, _END: 0}  # where the row of a statement has what counts as an event: its kind, or the state
_INSERT_MODEL = "INSERT OR REPLACE INTO models (run, name, version, time, aliases) VALUES (?, ?, ?, ?, ?)"
_INSERT_ENDPOINT = "INSERT OR REPLACE INTO endpoints (run, name, kind, address, state, time) VALUES (?, ?, ?, ?, ?, ?)"


def make_run_folder(folder: Path, spec: str | None) -> None:
    """Called last in the transaction of a new run: no row without a folder. Raises RunError on failure."""
    try:
        make_folder(folder)
        if spec is not None:
            create_private(folder / "spec.yaml").write_text(spec)
    except OSError as error:
        raise RunError(f"the folder of the run, {folder}, cannot be written: {error.strerror}") from error


@dataclass
class PendingWrites:
    """The rows of a run that are not yet written, in order; `num_rows` is their number in the database."""

    logged: list[LogEntry] = field(default_factory=list)
    shown: list[LogEntry] = field(default_factory=list)  # newest values that do not enter the history
    groups: dict[str, LogEntry] = field(default_factory=dict)  # the newest of each
    versions: list[tuple[int, int, int, float, str]] = field(default_factory=list)
    others: list[tuple[str, tuple[object, ...]]] = field(default_factory=list)
    forgotten_after: int | None = None  # drop later steps that were written before
    num_rows: int = 0

    def forget_after(self, step: int) -> None:
        for entries in (self.logged, self.shown):
            entries[:] = [entry for entry in entries if entry[0] <= step]
        self.groups = {group: entry for group, entry in self.groups.items() if entry[0] <= step}
        self.forgotten_after = step if self.forgotten_after is None else min(step, self.forgotten_after)
        logged = sum(len(values) for _, _, values in [*self.logged, *self.shown, *self.groups.values()])
        self.num_rows = logged + len(self.versions) + len(self.others) + 1

    def extend(self, later: PendingWrites) -> None:
        self.logged += later.logged
        self.shown += later.shown
        self.groups |= later.groups
        self.versions += later.versions
        self.others += later.others
        self.num_rows += later.num_rows


class RunRecorder:
    """Writes to one run; made by `create` and `reopen` (see `opening`). Every method may be called from any thread.

    | capacity           | what blocks                             | who unblocks   | close()                          |
    |--------------------|-----------------------------------------|----------------|----------------------------------|
    | MAX_PENDING values | `log` at capacity: it flushes           | the database   | writes the rest, ends the        |
    |                    | `flush`, `record_event`: for one commit | (busy timeout) | thread; later calls raise Closed |

    Metrics and weight versions wait up to half a second for the recorder's thread, which writes them together; all
    other records are committed before the call returns. That thread is also the heartbeat: a run is lost with its
    process.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        number: int,
        run_id: str,
        incarnation: int,
        folder: Path,
        store_mirror: StoreMirror | None = None,
        followers: RunFollowers | None = None,
        kind: RunKind = RunKind.OTHER,
    ) -> None:
        self.id, self.folder = run_id, folder
        self._kind = kind
        self._gauges: RunGauges | None = None
        self._number, self._incarnation = number, incarnation
        self._connection = connection
        self._store_mirror, self._followers = store_mirror, followers
        self._mirrors = MetricMirrors(run_id, folder, incarnation)
        self._pending = PendingWrites()
        self._status = Status.RUNNING
        self._newest = 0.0  # when the newest value of a curve was logged
        self._closed = False
        self._heartbeat_monotonic_s = time.monotonic()
        self._buffer_lock = threading.Lock()  # guards _pending and _closed; held for moments
        self._write_lock = threading.RLock()  # guards the connection and _status; held for a transaction
        self._writer = Mirror(f"run-{run_id}", self._write, FLUSH_INTERVAL_S, FLUSH_INTERVAL_S, f"run {run_id}")

    def log(self, step: int, values: Mapping[str, float], at: float | None = None, *, in_history: bool = True) -> None:
        """Record metrics of one step, also values that are not finite. Logging a step again replaces its values.

        at:         when they were measured, of values that a resumed run logs again; Unix time in seconds
        in_history: False: the values update the newest and the best, but enter no curve
        Raises ConfigError for an invalid metric name, a value that is not a number, and a step beyond 64 bits.
        """
        step, checked = validate_integer("step", step), validate_metrics(values)
        if self._pending.num_rows >= MAX_PENDING:  # as `_adding` does, which takes a microsecond more of each step
            self.flush()
        with self._buffer_lock:
            self._require_open()
            at = time.time() if at is None else at  # times grow in the order of commits, by which readers follow them
            if in_history:
                self._pending.logged.append((step, at, checked))
                self._newest = max(self._newest, at)
            else:
                self._pending.shown.append((step, at, checked))
            self._pending.num_rows += len(values)

    def log_group(self, step: int, group: str, values: Mapping[str, float]) -> None:
        """Record the newest values of the present members of a group, as `group/name`, and drop absent ones; no
        curves."""
        group = validate_text("group", group)
        named = validate_metrics({f"{group}/{name}": value for name, value in values.items()})
        entry = (validate_integer("step", step), time.time(), named)
        with self._adding(len(values) + 1) as pending:
            pending.groups[group] = entry

    def forget_after(self, step: int) -> None:
        """Remove the metrics of later, abandoned steps: the run goes on from `step`, or starts again.

        The newest and best values are then those of the remaining history. Raises RunError as `flush` does.
        """
        with self._write_lock:  # no batch is in flight, which would come back if its write failed
            with self._buffer_lock:
                self._require_open()
                self._pending.forget_after(validate_integer("step", step))
            self.flush()

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        """Add a distribution to files such as those of TensorBoard only: counts [bins] between edges [bins + 1]."""
        with self._buffer_lock:
            self._require_open()
        step, name = validate_integer("step", step), validate_metric_name(name)
        for mirror in self._mirrors:
            if not mirror.has_file:  # metrics logged before, perhaps of an earlier step, begin the file
                with suppress(RunError):  # written later; `flush` reports the error
                    self.flush()
                mirror.write()
            mirror.add_histogram(step, name, counts, edges)

    def record_weights(self, version: int, step: int, sha256: str, published_at: float) -> None:
        """Record that version `version` of the weights was published after step `step`."""
        version, step = validate_integer("version", version), validate_integer("step", step)
        row = (self._number, version, step, float(published_at), validate_text("sha256", sha256))
        with self._adding(1) as pending:
            pending.versions.append(row)

    def record_event(self, kind: str, /, **details: object) -> None:
        """Record an event; details are stored as JSON, and as text where JSON cannot hold them."""
        row = (self._number, time.time(), validate_text("kind", kind), to_json(details))
        self._write_through(INSERT_EVENT, row)

    def record_endpoint(self, name: str, kind: str, address: str, state: str) -> None:
        """Record the address and state of a gateway or endpoint of this run; the newest record counts."""
        fields = {"name": name, "kind": kind, "address": address, "state": state}
        texts = [validate_text(field, value) for field, value in fields.items()]
        self._write_through(_INSERT_ENDPOINT, (self._number, *texts, time.time()))

    def record_model(self, name: str, version: int, aliases: Sequence[str], decision: str = "") -> None:
        """Record that this run registered name@version. decision: what that made of the champion"""
        if decision:
            self.record_event(REGISTERED, model=f"{name}@{version}", decision=decision)
        words = json.dumps([validate_text("aliases", alias) for alias in aliases])
        row = (self._number, validate_text("name", name), validate_integer("version", version), time.time(), words)
        self._write_through(_INSERT_MODEL, row)

    def change_spec(self, spec: str) -> None:
        """Replace the recorded spec (YAML)."""
        spec = validate_text("spec", spec)
        self._write_through("UPDATE runs SET spec = ? WHERE number = ?", (spec, self._number))
        make_run_folder(self.folder, spec)

    def flush(self) -> None:
        """Commit everything recorded so far. Raises RunError when that fails; it is retried later."""
        self._flush(heartbeat_after_s=HEARTBEAT_INTERVAL_S)

    def heartbeat(self) -> None:
        """Record that the run is alive now. The recorder's thread does so every few seconds."""
        with self._buffer_lock:
            self._require_open()
        self._flush(heartbeat_after_s=0.0)

    def finish(self, status: Status | str, error: str | None = None) -> None:
        """Write the rest, record how the run ended, and close. Raises RunError unless `status` is terminal."""
        if status not in set(Status):
            raise RunError(f"{status!r} is no way for a run to end: it is one of {', '.join(sorted(TERMINAL))}")
        to = Status(status)
        error = None if error is None else escape_text(mask_variables(error))
        with self._write_lock:
            transition(self._status, to)
            with self._buffer_lock:
                self._closed = True
                self._pending.others.append((_END, (to, time.time(), error, self._number)))
            try:
                self._flush(heartbeat_after_s=0.0)
            finally:
                self._status = to
                self._release()

    def close(self) -> None:
        """Write the rest; a run without a recorded end is recorded as stopped. Idempotent."""
        with self._write_lock:
            if self._status not in TERMINAL:
                self.finish(Status.STOPPED)
        self._writer.close(BUSY_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Record the end of the run: finished, not reached, failed with the body's error, or stopped by a signal."""
        try:
            if self._status in TERMINAL:
                return
            if error is None or (isinstance(error, SystemExit) and not error.code):
                self.finish(Status.FINISHED)
            elif isinstance(error, KeyboardInterrupt) or getattr(error, "code", 0) == 128 + signal.SIGTERM:
                self.finish(Status.STOPPED, "interrupted")
            else:
                is_missed = isinstance(error, NotReached)
                ended = Status.NOT_REACHED if is_missed else Status.FAILED
                try:
                    self.finish(ended, str(error) if is_missed else f"{type(error).__name__}: {error}")
                except RunError as unwritable:  # the original error is raised
                    _log.warning("run %s: its end is not in the record: %s", self.id, unwritable)
        finally:
            self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise Closed(f"run {self.id!r} is {self._status.value}: nothing more can be recorded")

    @contextmanager
    def _adding(self, num_rows: int) -> Iterator[PendingWrites]:
        """The pending rows, to which the body adds so many. At capacity it flushes first."""
        if self._pending.num_rows >= MAX_PENDING:
            self.flush()
        with self._buffer_lock:
            self._require_open()
            yield self._pending
            self._pending.num_rows += num_rows

    def _write_through(self, statement: str, row: tuple[object, ...]) -> None:
        with self._adding(1) as pending:
            pending.others.append((statement, row))
        self.flush()

    def _flush(self, heartbeat_after_s: float) -> None:
        with self._write_lock:
            if self._status in TERMINAL:
                return
            if self._store_mirror is not None and self._store_mirror.problem:
                raise RunError(self._store_mirror.problem)
            with self._buffer_lock:
                pending, self._pending = self._pending, PendingWrites()
            if not pending.num_rows and time.monotonic() - self._heartbeat_monotonic_s < heartbeat_after_s:
                return
            try:
                self._commit(pending)
            except BaseException:  # even after an interruption nothing is lost: the next flush writes it
                with self._buffer_lock:
                    pending.extend(self._pending)
                    self._pending = pending
                raise
            self._heartbeat_monotonic_s = time.monotonic()
            if (step := pending.forgotten_after) is not None:
                self._mirrors.call_each(methodcaller("forget_after", step))
            self._mirrors.call_each(methodcaller("enqueue", pending.logged))
            self._publish(pending)
            if self._store_mirror is not None and pending.num_rows:
                self._store_mirror.mark_changed()

    def _publish(self, pending: PendingWrites) -> None:
        """Set the gauges of a run on a cluster; without Ray in this process there is no exporter."""
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        if self._gauges is None:
            from shoal.runs.ray_gauges import RunGauges

            self._gauges = RunGauges(self.id, self._kind)
        self._gauges.publish([*pending.logged, *pending.shown, *pending.groups.values()], pending.groups)
        self._gauges.count_events(str(row[_KIND[statement]]) for statement, row in pending.others if statement in _KIND)
        with suppress(OSError, ValueError):  # an old one is deleted meanwhile; there is none
            self._gauges.set_checkpoint(max(path.stat().st_mtime for path in self.folder.glob("checkpoints/step-*")))

    def _commit(self, pending: PendingWrites) -> None:
        run, connection = self._number, self._connection
        metrics = [(run, step, k, at, v) for step, at, values in pending.logged for k, v in values.items()]
        forgotten_after = pending.forgotten_after
        with translate_write_errors():
            remaining = (
                None
                if forgotten_after is None
                else metric_summaries.compute_summaries_up_to(connection, run, forgotten_after)
            )
        with transaction(connection):
            if forgotten_after is not None and remaining is not None:  # first: the pending rows are newer
                metric_summaries.delete_after(connection, run, forgotten_after, remaining)
            connection.executemany(_INSERT_METRIC, metrics)
            for group in pending.groups:
                metric_summaries.delete_group(connection, run, group)
            metric_summaries.update_summaries(
                connection, run, [*pending.logged, *pending.shown, *pending.groups.values()]
            )
            connection.executemany(_INSERT_VERSION, pending.versions)
            for statement, row in pending.others:
                connection.execute(statement, row)
            beat = connection.execute(
                "UPDATE runs SET heartbeat_at = ? WHERE number = ? AND id = ? AND incarnation = ?",
                (time.time(), run, self.id, self._incarnation),  # the number of a removed run may be another's
            )
            if beat.rowcount == 0:
                raise RunError(f"run {self.id!r} was resumed by another process, which records it now, or was removed")

    def _write(self) -> None:
        if self._closed:
            return
        self.flush()  # what it raises is logged; `flush` and `record_event` report it
        self._mirrors.call_each(methodcaller("write"))
        for details in () if self._followers is None else self._followers.check(self._newest):
            self.record_event("untracked", **details)
            _log.warning("run %s: %s", self.id, format_warning("untracked", details))

    def _release(self) -> None:
        self._writer.close(0.0)
        try:
            self._mirrors.call_each(methodcaller("close"))
            if self._followers is not None:  # they know by the end in the record that there are no more values
                closed = self._followers.close()
                rows = [(self._number, time.time(), "tracked", to_json(details)) for details in closed]
                try:
                    with transaction(self._connection):
                        self._connection.executemany(INSERT_EVENT, rows)
                except RunError as error:
                    _log.warning("run %s: %s", self.id, error)
            if self._store_mirror is not None:
                self._store_mirror.close()
        finally:
            self._connection.close()
