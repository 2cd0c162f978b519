"""The newest metrics of a run in Ray's own exporter, from which Prometheus scrapes all nodes of a cluster.

Called by the recorder's thread, in the process of a job's driver. The metric `train/loss` of a training run is the
gauge `ray_shoal_training_train_loss{run="ID"}`: Ray adds the prefix `ray_` and its own labels. The label `member` is
the trial, the actor or the opponent of a value, and empty for those of the run.

Beside them are what a run has met, `ray_shoal_run_events_total{run="ID", kind="checkpoint_failed"}`, and the time of
its newest checkpoint, `ray_shoal_run_checkpoint_timestamp_seconds`. Among the kinds are the state in which it ends, and
`not_finite train/loss` for each such value of a metric: of some it says that there is none now.

Ray drops a value that is not finite, and one that was not set again for two of its report intervals. So the recorder
sets all of them with each heartbeat, and the series of a run end with it, however it ends.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable
from math import isfinite

from ray.util.metrics import Counter, Gauge

from shoal.runs.record.metric_mirror import LogEntry
from shoal.runs.run_kind import RunKind

MAX_GAUGES = 500  # of one run, members counted apart
LABELS = ("run", "member")

# Of what is recorded as one value for each member: trials by a prefix, actors and opponents by a group's name.
_TRIAL = re.compile(r"(?P<member>trial-\d+)/(?P<name>.+)")
_GROUP = re.compile(r"(?P<name>actor_lag|rejected|win_rate)/(?P<member>.+)")
_NOT_ALLOWED = re.compile(r"[^a-zA-Z0-9_]+")
_log = logging.getLogger(__name__)


def name_gauge(kind: RunKind, metric: str) -> tuple[str, str]:
    """The name of a metric's gauge, and its label `member`: ("shoal_sweep_loss", "trial-003")."""
    match = _TRIAL.fullmatch(metric) or _GROUP.fullmatch(metric)
    name, member = (match["name"], match["member"]) if match else (metric, "")
    return f"shoal_{kind}_{_NOT_ALLOWED.sub('_', name).strip('_').lower()}", member


class RunGauges:
    """The gauges of one run."""

    def __init__(self, run_id: str, kind: RunKind) -> None:
        self._run_id, self._kind = run_id, kind
        self._gauges: dict[str, Gauge] = {}
        self._seen: set[tuple[str, str]] = set()
        self._newest: dict[str, float] = {}
        self._events = Counter("shoal_run_events_total", "events of a run", ("run", "kind"))
        self._checkpoint = Gauge("shoal_run_checkpoint_timestamp_seconds", "the newest checkpoint", ("run",))

    def count_events(self, kinds: Iterable[str]) -> None:
        for kind in kinds:
            self._events.inc(1.0, {"run": self._run_id, "kind": kind})

    def set_checkpoint(self, at: float) -> None:
        """at: Unix time of the newest one"""
        self._checkpoint.set(at, {"run": self._run_id})

    def publish(self, entries: Iterable[LogEntry], groups: Collection[str] = ()) -> None:
        """Set each metric to its newest value, also those without a new one.

        groups: those whose members are all in `entries`
        """
        gone = tuple(f"{group}/" for group in groups)
        self._newest = {name: value for name, value in self._newest.items() if not name.startswith(gone)}
        for _, _, values in entries:
            self._newest |= values
            self.count_events(f"not_finite {name}" for name, value in values.items() if not isfinite(value))
        for metric, value in self._newest.items():
            name, member = name_gauge(self._kind, metric)
            if (name, member) not in self._seen:
                if len(self._seen) >= MAX_GAUGES:
                    continue
                self._seen.add((name, member))
                if len(self._seen) == MAX_GAUGES:
                    _log.warning("run %s: metrics beyond %d are not exported", self._run_id, MAX_GAUGES)
            gauge = self._gauges.get(name) or self._gauges.setdefault(name, Gauge(name, metric, LABELS))
            gauge.set(value, {"run": self._run_id, "member": member})
