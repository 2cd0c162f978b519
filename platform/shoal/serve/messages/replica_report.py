"""A replica's report to the controller: its versions, its errors and its counts.

Made by the replica's model manager, retained by the controller. Pure data, small enough to be sent every second.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shoal.serve.messages.auth_failures import AuthFailure
from shoal.serve.messages.counts import Metric, ModelCounts, declare

# Forwards of one version, by batch size: class c has at least 2**c rows, and fewer than twice as many. (count, median
# in seconds)
ForwardMedians = Mapping[int, tuple[int, float]]
MAX_FORWARDS = 64  # the newest of one version and size, of which the median is taken
MAX_REJECTED = 16  # the newest are listed: a run publishes none twice, and its store has only the last
MAX_REASON_CHARS = 2000  # of a model's error; the replica's log has the full text


def truncate_reason(reason: str) -> str:
    """Shorten an error's text for reports, status and files."""
    return reason[:MAX_REASON_CHARS].encode(errors="backslashreplace").decode()


@dataclass(frozen=True)
class RejectedVersion:
    """A version that a replica rejected, with the reason.

    version: 0 when the model itself could not be built
    attempt: of the plan that tried it
    instead: the version that answers; 0 for none
    has_answered: whether it ever answered a request
    """

    version: int
    reason: str
    attempt: int = 0
    instead: int = 0
    has_answered: bool = False


@dataclass(frozen=True)
class ModelFailure:
    """A request that a version failed on with its own error; the replica's log has it under `reference`."""

    reference: str
    version: int
    reason: str

    def describe(self) -> str:
        """`RuntimeError: odd (3f2a9c1b)`."""
        return f"{self.reason} ({self.reference})"


@dataclass
class Residency:
    """A model that replicas load on demand, on one of them. Counts are those since the replica started.

    measured_bytes: by how much the process grew with a version, of those large enough, by number
    resident_bytes: of all its loaded versions
    load_s:   of the last load; `total_load_s` of all `loads`
    idle_s:   since the last request
    waiting:  requests that wait for its load; `waited` have so far
    requests: those it answered
    forwarded: requests for it that another replica answered
    """

    measured_bytes: dict[int, int] = field(default_factory=dict)
    resident_bytes: int = declare(
        Metric("shoal_model_resident_bytes", "Bytes of the loaded versions of a model on demand; 0: cold", "gauge")
    )
    load_s: float = 0.0
    total_load_s: float = declare(Metric("shoal_model_load_seconds_total", "Time that these loads took"))
    idle_s: float = 0.0
    waiting: int = declare(Metric("shoal_model_waiting_requests", "Requests that wait for its load", "gauge"))
    loads: int = declare(Metric("shoal_model_loads_total", "Loads of a model on demand"))
    evictions: int = declare(Metric("shoal_model_evictions_total", "How often it made way for others"))
    requests: int = 0
    forwarded: int = declare(Metric("shoal_model_forwarded_total", "Requests for it that another replica answered"))
    waited: int = declare(Metric("shoal_model_waited_total", "Requests that waited for its load"))


@dataclass(frozen=True)
class ModelReport:
    """One model on one replica.

    version:   the one that answers requests without a version; 0 for none
    candidate: the one that has a share alongside it; 0 for none
    next_staged: the version that is loaded under the plan's next options; 0 for none
    residency: of a model that is loaded on demand; None for others
    staged:    all that could answer at once or are in memory as received, ascending
    rejected:  those that this replica rejected; of a model that follows a run the newest, oldest first
    counts:    counts since the replica began to serve the model; None before
    forwards:  the newest forwards of each version
    latency:   (rows, seconds) of a forward, by the batcher's latency model
    failure:   the newest request that it failed on; None for none
    """

    version: int = 0
    candidate: int = 0
    staged: tuple[int, ...] = ()
    rejected: tuple[RejectedVersion, ...] = ()
    counts: ModelCounts | None = None
    forwards: Mapping[int, ForwardMedians] = field(default_factory=dict)
    queued_rows: int = declare(Metric("shoal_queued_rows", "Rows that wait for a slot", "gauge"))
    latency: tuple[tuple[int, float], ...] = ()
    failure: ModelFailure | None = None
    next_staged: int = 0
    residency: Residency | None = None


@dataclass(frozen=True)
class ReplicaReport:
    """One replica. It has applied the plan `generation`, except for versions that are still being staged.

    callers:  requests by the name of the key, and their outcomes, from AccessControl; `tokens`: of its texts
    refused:  refused calls, from AccessControl
    statuses: all answers over HTTP by status, of inferences and other requests
    computing_s: how long the current forward has taken; 0 for none
    host:     the name of its host
    address:  host:port of its HTTP server; "" before it listens
    certificate_expires_at: as in the plan
    """

    replica: str
    pid: int = 0
    generation: int = 0
    ready: bool = declare(
        Metric("shoal_replica_ready", "Whether the replica has every model ready", "gauge"), make=bool
    )
    models: Mapping[str, ModelReport] = field(default_factory=dict)
    callers: Mapping[str, Mapping[str, int]] = declare(
        Metric(
            "shoal_caller_requests_total",
            "Requests by the name of the key, and their outcomes",
            labels=("key", "result"),
        ),
        make=dict,
    )
    statuses: Mapping[str, int] = declare(
        Metric("shoal_http_answers_total", "All answers over HTTP, also without a model", labels=("status",)), make=dict
    )
    refused: tuple[AuthFailure, ...] = ()
    computing_s: float = 0.0
    host: str = ""
    address: str = ""
    certificate_expires_at: float = declare(
        Metric(
            "shoal_certificate_expires_timestamp_seconds",
            "When the endpoint's certificate expires, in seconds since the epoch; no series without one",
            "gauge",
            when=lambda report: report.certificate_expires_at,
        )
    )
    tokens: Mapping[str, Mapping[str, int]] = declare(
        Metric(
            "shoal_caller_tokens_total", "Tokens of texts by the name of the key: input, output", labels=("key", "kind")
        ),
        make=dict,
    )

    @property
    def loaded(self) -> frozenset[str]:
        """The models that answer here."""
        return frozenset(name for name, model in self.models.items() if model.version)

    @property
    def counts(self) -> dict[str, ModelCounts]:
        """Those of the models that it has begun to serve."""
        return {name: model.counts for name, model in self.models.items() if model.counts is not None}


@dataclass(frozen=True)
class PeerReport:
    """Another replica's report on its way. With a hundred models it takes milliseconds to decode, which a replica does
    when its metrics are read."""

    replica: str
    loaded: frozenset[str]
    encoded: bytes = field(repr=False)

    @classmethod
    def of(cls, report: ReplicaReport, encoded: bytes | None = None) -> PeerReport:
        """Of a report, which is encoded unless it already was."""
        return cls(report.replica, report.loaded, encode_report(report) if encoded is None else encoded)

    def decode(self) -> ReplicaReport:
        return decode_report(self.encoded)


def encode_report(report: ReplicaReport) -> bytes:
    """Encode it in a quarter of the time that Ray's own pickler, which is Python, takes."""
    return pickle.dumps(report, pickle.HIGHEST_PROTOCOL)


def decode_report(encoded: bytes) -> ReplicaReport:
    """The inverse of `encode_report`, between processes of one cluster."""
    report: ReplicaReport = pickle.loads(encoded)
    return report


def merge_forward_medians(reports: Iterable[ForwardMedians]) -> ForwardMedians:
    """Merge several replicas' medians: counts summed, medians averaged by count."""
    summed: dict[int, tuple[int, float]] = {}
    for report in reports:
        for size, (count, median_s) in report.items():
            before, before_s = summed.get(size, (0, 0.0))
            summed[size] = (before + count, (before * before_s + count * median_s) / (before + count))
    return summed
