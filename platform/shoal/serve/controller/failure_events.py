"""Records the models' own errors, which replicas report, as events: on requests, and when a version that has answered
cannot be loaded again.

Owned by the controller. A caller's mistake may repeat a thousand times a second: each model has at most one event of
each kind in `RECORD_S`; a replica's log has every error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal.serve.messages.replica_report import ReplicaReport

RECORD_S = 600.0


class FailureEvents:
    """record: appends an event, as `EndpointController.record_event`."""

    def __init__(self, record: Callable[..., None], clock: Callable[[], float]) -> None:
        self._record, self._clock = record, clock
        self._recorded_s: dict[tuple[str, str], float] = {}  # by model and kind
        self._known: dict[tuple[str, str], str] = {}  # the last reference by replica and model

    def receive(self, report: ReplicaReport, stable: Mapping[str, int]) -> None:
        """Take in a replica's report. stable: the answering version of each model"""
        for name, model in report.models.items():
            for rejected in model.rejected:
                if rejected.version and rejected.version == stable.get(name):
                    self._record_once(name, "load_failure", rejected.version, rejected.reason)
            failure = model.failure
            if failure is not None and self._known.get((report.replica, name)) != failure.reference:
                self._known[report.replica, name] = failure.reference
                self._record_once(name, "failure", failure.version, failure.describe())

    def _record_once(self, name: str, kind: str, version: int, reason: str) -> None:
        now_s = self._clock()
        if now_s - self._recorded_s.get((name, kind), -RECORD_S) >= RECORD_S:
            self._recorded_s[name, kind] = now_s
            self._record(kind, name, version, reason=reason)

    def forget(self, replica: str) -> None:
        """Forget a replica that has gone."""
        self._known = {key: reference for key, reference in self._known.items() if key[0] != replica}
