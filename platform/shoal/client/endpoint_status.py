"""The document at GET /shoal/v1/status: its fields, written by the endpoint's controller.

Read by the client, `shoal serve status` and `shoal serve simulate`; a missing field has its default, and a reader
ignores unknown fields. Pure data.
"""

from __future__ import annotations

import msgspec

STATUS_PATH = "/shoal/v1/status"
ROLLOUT_PATH = "/shoal/v1/rollout"


class VersionStatus(msgspec.Struct, frozen=True):
    """One version of a model, loaded on the replicas.

    track:          "stable", "candidate", "shadow", or "" for one that answers only requests for its number
    share:          of the model's requests without a version, 0 to 1, over the replicas that answer
    requests:       requests given to it since it was loaded, over all replicas, shadowed ones too; `errors` of them
                    failed with a 5xx
    requests_per_s, p50_s, p99_s: over the last `EndpointStatus.window_s`; None where there were none
    compared, disagreed: requests that the stable version and this one computed, and those whose outputs differed
    columns:        of rows, by column, the values that training has not seen: gap, unknown (refused), beyond the range
    """

    version: int
    track: str = ""
    share: float = 0.0
    requests: int = 0
    errors: int = 0
    requests_per_s: float = 0.0
    p50_s: float | None = None
    p99_s: float | None = None
    compared: int = 0
    disagreed: int = 0
    columns: dict[str, dict[str, int]] = {}


class MetricStatus(msgspec.Struct, frozen=True):
    """What a library counts for a model, over the last `EndpointStatus.window_s` and all replicas.

    help:  what it is; its name is that of its family of Prometheus
    per_s: of a counter
    p50_s, p99_s: of a histogram of seconds; None where there was no value
    """

    help: str = ""
    per_s: float | None = None
    p50_s: float | None = None
    p99_s: float | None = None


class ResidencyStatus(msgspec.Struct, frozen=True):
    """Where a model is that replicas load when it is requested. Counts are those of the present replicas.

    replicas:  those that have it loaded; 0: the next request waits for its load
    resident_bytes: of its loaded versions, over all replicas
    waiting:   requests that wait for its load; `waited` have so far
    load_s:    of a load, on average; None before the first
    forwarded: requests that reached a replica without it, and that another answered
    """

    replicas: int = 0
    resident_bytes: int = 0
    waiting: int = 0
    loads: int = 0
    evictions: int = 0
    load_s: float | None = None
    forwarded: int = 0
    waited: int = 0


class EvidenceStatus(msgspec.Struct, frozen=True):
    """What a candidate is judged by: the counts since it was opened, and the limits of the model's guard.

    requests, errors, stable_requests, stable_errors: without those that fail on both versions
    latency_ratio:  its compute time over the stable version's, for batches of equal size; None before there are some
    metric, value:  the user's, as it was last reported; None before that
    max_error_rate: None: it may not fail more often than the stable version by more than chance
    min_requests:   before a judgement
    """

    requests: int = 0
    errors: int = 0
    stable_requests: int = 0
    stable_errors: int = 0
    compared: int = 0
    disagreed: int = 0
    lost_replicas: int = 0
    latency_ratio: float | None = None
    metric: str = ""
    value: float | None = None
    max_error_rate: float | None = None
    max_latency_ratio: float = 0.0
    max_disagreement: float | None = None
    min_value: float = 0.0
    min_requests: int = 0


class ModelStatus(msgspec.Struct, frozen=True):
    """One model of the endpoint.

    state:      of the protocol: READY, LOADING, UNLOADING, UNAVAILABLE; `reason` when it is not READY
    phase:      of its rollout: vacant, steady, staging, canary, flipping; "live" when it follows a run
    source:     its source: `name@champion` of the registry, or `a run` when live
    pinned:     the version to which a live model is pinned; 0 while it follows its run
    newest_percent: the run's newest version's part of the requests alongside the pinned one; None: it has no share
    stable, candidate: the versions of its rollout, the candidate also while it is being loaded; 0 for none. A model
                that follows a run has no stable version here; its candidate is the newest, while that has a share
    queued_rows, max_queued_rows: over all replicas
    batch_rows: mean rows of a batch over the last `EndpointStatus.window_s`; None where there was none
    refused:    requests answered with 429 or 504 since the start, over all replicas
    requests, errors, rows: answered or failed by any version since the endpoint's deployment, over all replicas, also
                those that have ended while this controller ran; the requests that failed with a 5xx; the rows of the
                answers
    latency:    measured (rows, seconds) of a forward, ascending, for `shoal serve simulate`
    residency:  of a model that is loaded when it is requested; None for one that every replica has
    evidence:   of its open candidate; None without one
    last_failure: a request that the model failed on, and the reference that its caller received; "" for none
    metrics:    of libraries, by name: the tokens of texts, and their times
    history:    (time, version, requests per second, p99 in seconds) of the newest minutes with requests
    """

    name: str
    state: str = "READY"
    reason: str = ""
    phase: str = ""
    source: str = ""
    pinned: int = 0
    newest_percent: float | None = None
    stable: int = 0
    candidate: int = 0
    versions: list[VersionStatus] = []
    queued_rows: int = 0
    max_queued_rows: int = 0
    batch_rows: float | None = None
    max_batch_rows: int = 0
    deadline_s: float | None = None
    refused: int = 0
    requests: int = 0
    errors: int = 0
    rows: int = 0
    latency: list[tuple[int, float]] = []
    last_failure: str = ""
    residency: ResidencyStatus | None = None
    evidence: EvidenceStatus | None = None
    metrics: dict[str, MetricStatus] = {}
    history: list[tuple[float, int, float, float | None]] = []


class ReplicaStatus(msgspec.Struct, frozen=True):
    """One replica. It has staged `generation` of the desired state; `error` has the reason why it could not stage the
    next, or the time of its current forward; `host` is its host's name."""

    id: str
    pid: int = 0
    generation: int = 0
    ready: bool = True
    error: str = ""
    host: str = ""


class RolloutEvent(msgspec.Struct, frozen=True):
    """One change. `kind`: canary, promote, rollback, shadow, deploy, load, pin, follow, delete, ..."""

    time: float
    kind: str
    model: str = ""
    version: int | None = None
    reason: str = ""
    by: str = ""


class CertificateStatus(msgspec.Struct, frozen=True):
    """The certificate of the ingress. `problem`: why the present files are not used; then the former one stays."""

    expires_at: float
    days_remaining: float
    problem: str = ""


class EndpointStatus(msgspec.Struct, frozen=True):
    """The full endpoint. Times are seconds since the epoch; `events` are the newest, oldest first.

    owner: who has deployed it, USER@HOST
    lifetime: "driver": it ends with the process that deployed it; "detached": `shoal serve delete` ends it; "serve":
        Serve's own commands do
    grpc: host:port of gRPC; "" without gRPC
    certificate: that of the ingress; None for plain HTTP
    num_replicas: the planned number; the least for an endpoint that scales with its load
    wanted: the replicas that have no place yet, and why; "" for none
    asleep: it has no replica, and the next request starts one; the ingress, which then answers, knows nothing else
    """

    endpoint: str
    time: float = 0.0
    started_at: float = 0.0
    window_s: float = 0.0
    generation: int = 0
    owner: str = ""
    lifetime: str = ""
    grpc: str = ""
    ready: bool = True
    num_replicas: int = 0
    wanted: str = ""
    asleep: bool = False
    replicas: list[ReplicaStatus] = []
    models: list[ModelStatus] = []
    events: list[RolloutEvent] = []
    certificate: CertificateStatus | None = None
