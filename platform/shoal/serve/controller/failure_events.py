"""Records the models' own errors on requests, which replicas report, as events.

Owned by the controller. A caller's mistake may repeat a thousand times a second: each model has at most one event in
`RECORD_S`; a replica's log has every error.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.serve.messages.replica_report import ReplicaReport

RECORD_S = 600.0


class FailureEvents:
    """record: appends an event, as `EndpointController.record_event`."""

    def __init__(self, record: Callable[..., None], clock: Callable[[], float]) -> None:
        self._record, self._clock = record, clock
        self._recorded_s: dict[str, float] = {}
        self._known: dict[tuple[str, str], str] = {}  # the last reference by replica and model

    def receive(self, report: ReplicaReport) -> None:
        """Take in a replica's report."""
        for name, model in report.models.items():
            failure, now_s = model.failure, self._clock()
            if failure is None or self._known.get((report.replica, name)) == failure.reference:
                continue
            self._known[report.replica, name] = failure.reference
            if name not in self._recorded_s or now_s - self._recorded_s[name] >= RECORD_S:
                self._recorded_s[name] = now_s
                self._record("failure", name, failure.version, reason=failure.describe())

    def forget(self, replica: str) -> None:
        """Forget a replica that has gone."""
        self._known = {key: reference for key, reference in self._known.items() if key[0] != replica}
