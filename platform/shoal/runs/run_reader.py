"""The reading side of the run record: a run's data, while it is running, after it ended, or after it died.

Called by the CLI, the report and flows. Opens one connection per query; never writes.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from shoal.errors import RunError, needs_extra
from shoal.home import home
from shoal.runs.event_messages import WAITING
from shoal.runs.record.database import list_run_ids, read_connection
from shoal.runs.run_kind import RunKind, format_name
from shoal.runs.run_status import Status, resolve_status

if TYPE_CHECKING:
    from pandas import DataFrame

MEAN_RETURN = "return/mean_100"
RETURNS = "return/"  # prefix of the mean returns of a run of several policies
# The number of the event that began the run's last incarnation; NULL in its first.
_RESUMED = "(SELECT max(number) FROM events WHERE run = :run AND kind = 'resumed')"

# The headline metric of a run without mean returns: a part of the metric's name, and whether more is better.
VALIDATION = "validation/"  # prefix of metrics evaluated on held-out data
SESSIONS = "sessions/"  # prefix of metrics of all sessions of agents, and not of those that are learnt alone
_HEADLINES = (
    ("return", True),
    ("reward", True),
    ("accuracy", True),
    ("score", True),
    ("loss", False),
    ("error", False),
    ("perplexity", False),
    ("bits_per", False),
    ("mae", False),
    ("mse", False),
)
# Words of a metric's name with the same meaning, but which are also parts of other words.
_MORE_IS_BETTER = frozenset(
    (
        *("acc", "ap", "auc", "auroc", "auprc", "bleu", "coverage", "dice", "f1", "iou", "map", "mrr", "ndcg"),
        *("precision", "psnr", "r2", "recall", "rouge", "ssim", "success", "top1", "top5"),
    )
)
_TRIAL = re.compile(r"^trial-[^/]*/")  # of a sweep, that has the metric
_LESS_IS_BETTER = frozenset(("bpb", "bpc", "cer", "distance", "err", "fid", "kl", "mape", "nll", "ppl", "wer"))


@dataclass(frozen=True)
class EndpointRecord:
    """The address of a gateway for actors or an endpoint for requests."""

    name: str
    kind: str
    address: str
    state: str


class MetricValue(NamedTuple):
    """One value of a metric.

    time: when it was logged; Unix time in seconds
    """

    step: int
    name: str
    time: float
    value: float


class EventRecord(NamedTuple):
    """One event. time: Unix time in seconds"""

    number: int
    time: float
    kind: str
    details: dict[str, Any]


def load(ref: str) -> Run:
    """The run with this id, or with a unique id that begins so, or the newest for `latest`.

    Raises RunError, with similar ids, if there is none.
    """
    folder = home()
    if os.environ.get("SHOAL_STORE"):
        _refresh_copies(folder, ref)
    with read_connection(folder) as connection:
        return Run._from_row(find_run_row(connection, ref), folder)


def list_runs(limit: int = 50) -> list[Run]:
    """The newest runs, newest first; with `$SHOAL_STORE`, also those of other hosts."""
    folder = home()
    if os.environ.get("SHOAL_STORE"):
        _refresh_copies(folder)
    with read_connection(folder) as connection:
        rows = connection.execute("SELECT * FROM runs ORDER BY created_at DESC, number DESC LIMIT ?", (limit,))
        return [Run._from_row(row, folder) for row in rows]


def list_with_best(limit: int) -> list[tuple[Run, tuple[str, float] | None]]:
    """The newest runs, newest first, each with `Run.best`; two queries in all."""
    listed = list_runs(limit)
    numbers = ",".join(str(run._number) for run in listed)
    found: dict[int, list[sqlite3.Row]] = defaultdict(list)
    with read_connection(home()) as connection:
        for row in connection.execute(f"SELECT run, name, lowest, highest FROM summaries WHERE run IN ({numbers})"):
            found[row["run"]].append(row)
    return [(run, _choose_best(found[run._number])) for run in listed]


def list_running() -> list[Run]:
    """Every run in progress of this host's record, newest first, however many were created since."""
    folder = home()
    with read_connection(folder) as connection:
        rows = connection.execute(
            "SELECT * FROM runs WHERE status = ? ORDER BY created_at DESC, number DESC", (Status.RUNNING,)
        )
        seen = [Run._from_row(row, folder) for row in rows]
    return [run for run in seen if run.status is Status.RUNNING and run.copied_from is None]


def _refresh_copies(folder: Path, ref: str = "") -> None:
    """Unless `ref` is a run in progress of this host: its processes poll it."""
    from shoal.runs.record.store_copies import refresh

    with read_connection(folder) as connection:
        row = connection.execute("SELECT * FROM runs WHERE id = ?", (ref,)).fetchone()
    if row is None or row["copied_from"] or resolve_status(row) is not Status.RUNNING:
        refresh(folder)


def find_run_row(connection: sqlite3.Connection, ref: str) -> sqlite3.Row:
    """The row of `runs` for `ref`; `latest` is one of this host, if there is any. Raises RunError."""
    row: sqlite3.Row | None = connection.execute("SELECT * FROM runs WHERE id = ?", (ref,)).fetchone()
    if row is not None:
        return row
    ids = list_run_ids(connection)
    if not ids:
        raise RunError(f"there is no run {ref!r}, and no other: start one with `shoal run`")
    matches = [ids[-1]] if ref == "latest" else [one for one in ids if ref and one.startswith(ref)]
    if len(matches) > 1:
        raise RunError(f"{ref!r} begins {len(matches)} runs: {', '.join(matches[-3:])}: type more of the id")
    if not matches:
        near = difflib.get_close_matches(ref, ids, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the newest is {ids[-1]}."
        raise RunError(f"there is no run {ref!r}: {hint} `shoal runs` lists them all")
    found: sqlite3.Row = connection.execute("SELECT * FROM runs WHERE id = ?", (matches[0],)).fetchone()
    return found


def infer_direction(metric: str) -> bool | None:
    """Whether a higher value of the metric is better; None if its name does not show it."""
    words = set(re.split(r"[^a-z0-9]+", metric.lower()))
    if "std" in words:
        return None
    if words & _MORE_IS_BETTER or words & _LESS_IS_BETTER:
        return bool(words & _MORE_IS_BETTER)
    return next((more_is_better for part, more_is_better in _HEADLINES if part in metric.lower()), None)


def is_higher_better(metric: str) -> bool:
    """Whether a higher value of the metric is better; True if its name does not show it."""
    return infer_direction(metric) is not False


# Of `runs`, which are fields of `Run` as they are.
_COLUMNS = (
    *("id", "job", "spec", "command", "git_revision", "created_at", "finished_at", "heartbeat_at"),
    *("host", "pid", "incarnation", "error", "copied_from", "owner"),
)


@dataclass(frozen=True)
class Run:
    """One run as it was when loaded; the methods read the present record.

    The fields `*_at` are seconds since the epoch; in the tables, `time` is in seconds since the run was created.

    status:    `Status.LOST` when the record says running and its writer is gone
    spec:      the YAML that the run was created with
    command:   the command that started it first
    git_dirty: tracked files differed from git_revision
    incarnation: how often it was started: 1, and one more for each resume
    kind:      what it does, whatever its job is called
    copied_from: the host that records the run, if it was read from the store; None for a run of this host
    owner:     USER@HOST of who has started it
    """

    id: str
    job: str
    status: Status
    spec: str = field(repr=False)
    command: str
    git_revision: str | None
    git_dirty: bool
    created_at: float
    finished_at: float | None
    heartbeat_at: float
    host: str
    pid: int
    incarnation: int
    error: str | None
    folder: Path
    _home: Path = field(repr=False)
    _number: int = field(repr=False)
    kind: RunKind = field(repr=False)
    copied_from: str | None = None
    owner: str | None = None

    @classmethod
    def _from_row(cls, row: sqlite3.Row, folder: Path) -> Self:
        named = {name: row[name] for name in _COLUMNS}
        return cls(
            **named,
            status=resolve_status(row),
            git_dirty=bool(row["git_dirty"]),
            folder=Path(folder, "runs", row["id"]),
            _home=folder,
            _number=row["number"],
            kind=RunKind(row["kind"] or RunKind.OTHER),
        )

    def reload(self) -> Run:
        """This run as the record of this host has it now. Raises RunError when it was removed."""
        with read_connection(self._home) as connection:
            return self._from_row(find_run_row(connection, self.id), self._home)

    @property
    def name(self) -> str:
        """What it is called in lists, tables and legends: as its spec names it, or its Task, or its job."""
        return format_name(self.job, self.kind, self.spec)

    @property
    def duration_s(self) -> float:
        """From creation to the end; to now while running; to the last heartbeat when lost."""
        if self.status is Status.RUNNING:
            return time.time() - self.created_at
        return (self.finished_at or self.heartbeat_at) - self.created_at

    def metrics(self) -> DataFrame:
        """Every metric: index `step`, column `time` (when the step was last logged), one column per metric."""
        with needs_extra("data"):
            import pandas

        rows = self.query("SELECT step, time, name, value FROM metrics WHERE run = :run ORDER BY step")
        frame = pandas.DataFrame([tuple(row) for row in rows], columns=["step", "time", "name", "value"])
        frame["value"] = frame["value"].astype(float)
        wide = frame.pivot(index="step", columns="name", values="value").rename_axis(columns=None)
        wide.insert(0, "time", (frame.groupby("step")["time"].max() - self.created_at).astype(float))
        return wide

    def list_values(self, after: float, most: int) -> list[MetricValue]:
        """The values logged after a time (Unix time in seconds), oldest first; values of one time are not separated.

        most: of values, as far as that goes
        """
        new = "FROM metrics WHERE run = :run AND time > :after"
        rows = self.query(
            f"SELECT step, name, time, value {new} AND time <= (SELECT max(time) FROM"
            f" (SELECT time {new} ORDER BY time LIMIT :most)) ORDER BY time, step, name",
            after=after,
            most=most,
        )
        return [
            MetricValue(step, name, at, math.nan if value is None else value)
            for step, name, at, value in map(tuple, rows)
        ]

    def latest(self, since_resumed: bool = False) -> dict[str, float]:
        """The newest value of each metric; cheap enough to poll several times a second.

        since_resumed: only of the metrics that were logged since the run was last resumed
        """
        since = f" AND time >= ifnull((SELECT time FROM events WHERE number = {_RESUMED}), 0)" if since_resumed else ""
        rows = self.query("SELECT name, value FROM summaries WHERE run = :run" + since)
        return {row["name"]: math.nan if row["value"] is None else row["value"] for row in rows}

    def best(self) -> tuple[str, float] | None:
        """The run's headline metric and its best finite value; None if it logged no such metric."""
        return _choose_best(self.query("SELECT name, lowest, highest FROM summaries WHERE run = :run"))

    def events(self) -> DataFrame:
        """The events, in order: columns time, kind, details (a dict)."""
        rows = [(each.time - self.created_at, each.kind, each.details) for each in self.read_events()]
        return _to_frame(rows, ["time", "kind", "details"])

    def read_events(self, after: float = -1, most: int = -1) -> list[EventRecord]:
        """The newest events, oldest first, whose number is greater than `after`. most: -1: all of them"""
        rows = self.query(
            "SELECT number, time, kind, details FROM events WHERE run = :run AND number > :after"
            " ORDER BY number DESC LIMIT :most",
            after=after,
            most=most,
        )
        return [EventRecord(number, at, kind, json.loads(details)) for number, at, kind, details in reversed(rows)]

    def list_events(self, *kinds: str, since_resumed: bool = False) -> list[tuple[str, dict[str, Any]]]:
        """The events of these kinds, in order, as (kind, details); cheap enough to poll several times a second.

        since_resumed: only those since the run was last resumed
        """
        since = f" AND number > ifnull({_RESUMED}, 0)" if since_resumed else ""
        rows = self.query(f"SELECT kind, details FROM events WHERE run = :run{since} ORDER BY number")
        return [(row["kind"], json.loads(row["details"])) for row in rows if row["kind"] in kinds]

    def last_events(self, since_resumed: bool = False) -> dict[str, dict[str, Any]]:
        """The details of the newest event of each kind; cheap enough to poll several times a second.

        since_resumed: only of the events since the run was last resumed, and not of the resumption itself
        """
        since = f" AND number > ifnull({_RESUMED}, 0)" if since_resumed else ""
        # With max(), SQLite takes the other columns from the row of the maximum.
        rows = self.query(f"SELECT kind, details, max(number) FROM events WHERE run = :run{since} GROUP BY kind")
        return {row["kind"]: json.loads(row["details"]) for row in rows}

    def list_commands(self) -> list[str]:
        """The command that started the run, and those that resumed it, oldest first."""
        return [self.command, *(details["command"] for _, details in self.list_events("resumed"))]

    def read_queue_entry(self) -> dict[str, Any] | None:
        """The details with which it waits in its cluster's queue (position, owner, priority, needs, since_s, reason);
        None when it does not."""
        if self.status is not Status.RUNNING:
            return None
        details = self.last_events(since_resumed=True).get(WAITING, {})
        return details if details.get("reason") and "position" in details else None

    def last_started_at(self) -> float:
        """When the run was last resumed, or else created; Unix time in seconds."""
        (row,) = self.query(f"SELECT (SELECT time FROM events WHERE number = {_RESUMED}) AS time")
        return self.created_at if row["time"] is None else float(row["time"])

    def num_versions(self) -> int:
        """How many versions of the weights were published."""
        return int(self.query("SELECT count(*) FROM versions WHERE run = :run")[0][0])

    def versions(self) -> DataFrame:
        """The published weight versions: columns version, step, time, sha256."""
        rows = self.query(
            "SELECT version, step, time - :created_at, sha256 FROM versions WHERE run = :run ORDER BY version"
        )
        return _to_frame([tuple(row) for row in rows], ["version", "step", "time", "sha256"])

    def find_step(self, version: int) -> int | None:
        """The step of a version of the weights; None if it was not published."""
        rows = self.query("SELECT step FROM versions WHERE run = :run AND version = :version", version=version)
        return rows[0]["step"] if rows else None

    def models(self) -> DataFrame:
        """The models that the run registered: columns name, version, time, aliases (a list, as the run left them)."""
        models = [(name, version, at - self.created_at, aliases) for name, version, at, aliases in self.list_models()]
        return _to_frame(models, ["name", "version", "time", "aliases"])

    def list_models(self) -> list[tuple[str, int, float, list[str]]]:
        """The registered versions, oldest first. An alias names the last one that it was moved to."""
        rows = self.query("SELECT name, version, time, aliases FROM models WHERE run = :run ORDER BY time")
        last = {(row["name"], alias): row["version"] for row in rows for alias in json.loads(row["aliases"])}
        return [
            (
                row["name"],
                row["version"],
                row["time"],
                [alias for alias in json.loads(row["aliases"]) if last[row["name"], alias] == row["version"]],
            )
            for row in rows
        ]

    def endpoints(self) -> list[EndpointRecord]:
        """The run's addresses, by name. Endpoints that a lost run had not closed have the state `lost`."""
        rows = self.query("SELECT name, kind, address, state FROM endpoints WHERE run = :run ORDER BY name")
        endpoints = [EndpointRecord(*row) for row in rows]
        if self.status is Status.LOST:
            return [replace(each, state="lost") if each.state != "closed" else each for each in endpoints]
        return endpoints

    def to_dict(self) -> dict[str, object]:
        """Everything except the histories, ready for JSON (non-finite values become None)."""
        best = self.best()
        return {
            **{name: getattr(self, name) for name in (*_COLUMNS, "name", "git_dirty", "duration_s")},
            "status": self.status.value,
            "queue": self.read_queue_entry(),
            "folder": str(self.folder),
            "latest": {name: value if math.isfinite(value) else None for name, value in self.latest().items()},
            "best": {"name": best[0], "value": best[1]} if best else None,
            "num_versions": self.num_versions(),
            "endpoints": [asdict(endpoint) for endpoint in self.endpoints()],
            "models": [
                {"name": name, "version": version, "aliases": aliases}
                for name, version, _, aliases in self.list_models()
            ],
        }

    def query(self, sql: str, **others: float) -> list[sqlite3.Row]:
        """The rows of a query; its parameters are `:run` (this run), `:created_at` and `others`."""
        parameters = {"run": self._number, "created_at": self.created_at, **others}
        with read_connection(self._home) as connection:
            return connection.execute(sql, parameters).fetchall()

    def query_parts(self, sql: str, size: int, **others: float) -> Iterator[list[tuple[Any, ...]]]:
        """The rows of `query` as tuples, so many at once: of a long history, which would fill the memory."""
        parameters = {"run": self._number, "created_at": self.created_at, **others}
        with read_connection(self._home) as connection:
            connection.row_factory = None
            rows = connection.execute(sql, parameters)
            while part := rows.fetchmany(size):
                yield part


def _choose_best(rows: list[sqlite3.Row]) -> tuple[str, float] | None:
    """The headline metric among rows of `summaries`, which may be of one run alone, and its best value."""
    for row in rows:
        if row["name"] == MEAN_RETURN:  # even if there are others, such as an evaluation's return
            return None if row["highest"] is None else (MEAN_RETURN, row["highest"])
    rows = [row for row in rows if row["lowest"] is not None]
    rows.sort(key=lambda row: not row["name"].startswith((VALIDATION, RETURNS, SESSIONS)))  # these judge better
    for part, more_is_better in _HEADLINES:
        named = [row for row in rows if part in row["name"]]
        if named:
            metric = _TRIAL.sub("", named[0]["name"])
            trials = [row for row in named if _TRIAL.sub("", row["name"]) == metric]  # of a sweep, else one row
            value, choose = ("highest", max) if more_is_better else ("lowest", min)
            best = choose(trials, key=lambda row: float(row[value]))
            return best["name"], best[value]
    return None


def _to_frame(rows: Sequence[tuple[object, ...]], columns: list[str]) -> DataFrame:
    with needs_extra("data"):
        import pandas

    return pandas.DataFrame(rows, columns=columns)
