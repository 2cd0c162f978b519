"""The counts of serving, each declared once: its field, its names and help for Prometheus, and how replicas add up.

`ModelStatistics` writes those of a model, a replica's report carries all of them (`replica_report`), `merge` sums those
of several versions or replicas, `prometheus` renders them, and the status takes those that have its fields' names. A
new count is a field, here or in the report, and where it is counted; if the status has it, a field of that name there.
Plain data for other processes: counts nothing itself.
"""
# ruff: noqa: RUF009 - `declare` makes a field

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from operator import attrgetter, itemgetter
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Kind = Literal["counter", "gauge", "histogram"]

SECONDS = tuple(0.00025 * 2**power for power in range(17))  # 0.25 ms to 16.4 s, each twice the one before
ROWS = tuple(float(2**power) for power in range(11))  # 1 to 1024
# Triton has four reasons: rejected, cancelled, failed in the model, and other.
_REASONS = {429: "REJECTED", 503: "REJECTED", 504: "REJECTED", 499: "CANCELED", 500: "BACKEND"}

_ATOMS, _SEQUENCES = (int, float, str), (list, tuple)  # `isinstance` of a union takes twice as long


@dataclass(frozen=True)
class Metric:
    """A family of series of Prometheus.

    labels: of the keys of a count that is a mapping, or a mapping of mappings; in addition to those of its owner
    read:   the exported value, of the stored one
    when:   whether its owner, such as a version, has such a series
    """

    name: str
    help: str
    kind: Kind = "counter"
    labels: tuple[str, ...] = ()
    read: Callable[[Any], Any] = lambda value: value
    when: Callable[[Any], object] = lambda owner: True


def declare(
    *metrics: Metric, make: Callable[[], Any] = int, merge: Callable[[Sequence[Any]], Any] | None = None
) -> Any:
    """Make a field of a dataclass that is a count, exported as these families.

    make:  its value before anything is counted
    merge: its value over several versions or replicas; None: their sum
    """
    return field(default_factory=make, metadata={"metrics": metrics, "merge": merge})


@functools.cache
def list_declared(owner: type) -> list[tuple[str, Metric]]:
    """The families of a dataclass, each with its field."""
    return [(each.name, metric) for each in fields(owner) for metric in each.metadata.get("metrics", ())]


@functools.cache
def _list_rules(owner: type) -> tuple[Callable[[Any], tuple[Any, ...]], list[Callable[[Sequence[Any]], Any]]]:
    """What reads all fields of a dataclass, and how each is merged."""
    names = [each.name for each in fields(owner)]
    return attrgetter(*names), [each.metadata.get("merge") or merge for each in fields(owner)]


def merge(values: Sequence[T]) -> T:
    """What several versions or replicas have counted together; of a single one, a copy. Takes at least one."""
    first: Any = values[0]
    merged: Any
    if isinstance(first, _ATOMS):
        merged = sum(values)
    elif isinstance(first, dict):
        maps: Any = values
        keys = first if len(values) == 1 else dict.fromkeys(key for each in maps for key in each)
        merged = {key: merge([each[key] for each in maps if key in each]) for key in keys}
    elif isinstance(first, _SEQUENCES):
        merged = first[:] if len(values) == 1 else type(first)(map(sum, zip(*values, strict=True)))
    else:
        read, rules = _list_rules(first.__class__)
        if len(values) == 1:  # which happens every second
            parts = [part if isinstance(part, _ATOMS) else merge([part]) for part in read(first)]
        else:
            parts = [rule(parts) for rule, parts in zip(rules, zip(*map(read, values), strict=True), strict=True)]
        merged = type(first)(*parts)
    return merged  # type: ignore[no-any-return]


@dataclass(slots=True)
class Histogram:
    """Counts values between ascending bounds: `counts[i]` are at most `bounds[i]` and above the bound before; the last
    count has the rest."""

    bounds: Sequence[float] = field(metadata={"merge": itemgetter(0)})
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def since(self, earlier: Histogram | None) -> Histogram:
        """The values observed since an earlier copy. A replica that left takes its counts with it: a lower count than
        before counts as none."""
        if earlier is None:
            return self
        counts = [max(0, new - old) for new, old in zip(self.counts, earlier.counts, strict=True)]
        return Histogram(self.bounds, counts, max(0.0, self.sum - earlier.sum))

    def estimate_quantile(self, q: float) -> float | None:
        """Estimate the `q` quantile (0 to 1), linear between bounds; None without values.

        Above the last bound nothing is known: the result is the last bound.
        """
        wanted = q * sum(self.counts)
        if wanted <= 0.0:
            return None
        num_below = 0
        for (low, high), num in zip(pairwise([0.0, *self.bounds]), self.counts, strict=False):
            if num_below + num >= wanted:
                return low + (high - low) * (wanted - num_below) / num
            num_below += num
        return self.bounds[-1]


@dataclass
class LibraryMetric:
    """A family of Prometheus with one series for a model, which a library counts."""

    kind: Kind = field(metadata={"merge": itemgetter(0)})
    help: str = field(metadata={"merge": itemgetter(0)})
    value: float | Histogram


def _count_reasons(statuses: Mapping[int, int]) -> Mapping[str, int]:
    reasons: Counter[str] = Counter()
    for status, num in statuses.items():
        if status != 200:
            reasons[_REASONS.get(status, "OTHER")] += num
    return reasons


def _count_time(name: str, text: str) -> Any:
    return declare(Metric(f"nv_inference_{name}_duration_us", text, read=lambda ns: ns // 1000))


def _count_shadow(name: str, text: str) -> Any:
    return declare(Metric(f"shoal_shadow_{name}_total", text, when=lambda of: of.compared or of.shadow_failed))


def _observe(name: str, text: str, bounds: Sequence[float] = SECONDS) -> Any:
    return declare(Metric(name, text, "histogram"), make=lambda: Histogram(bounds))


_BY_STATUS = (
    Metric(
        "shoal_requests_total", "Requests by HTTP status; no version: refused before one was chosen", labels=("status",)
    ),
    Metric(
        "nv_inference_request_failure",
        "Requests that failed, by Triton's reason",
        labels=("reason",),
        read=_count_reasons,
    ),
)


@dataclass(slots=True)
class VersionCounts:
    """One version. Forward threads write `batches`, `sizes` and `columns`, the event loop the rest.

    compared:  requests that another version answered and this one computed too; `disagreed` of them differed
    shadow_failed: requests that another version answered and that failed on this one
    failed_on_both: requests that failed on this version and, computed to find the cause, on the one it is compared with
    sizes:     by rows of a batch: (batches, ns)
    columns:   by column of a table: values that training has not seen, by their sort; replaced, never changed
    last_ms:   when it answered last, in milliseconds since 1970; `used`: in the order of uses
    """

    answered: int = declare(Metric("nv_inference_request_success", "Requests that were answered"))
    rows: int = declare(Metric("nv_inference_count", "Rows that were answered"))
    batches: int = declare(Metric("nv_inference_exec_count", "Batches that were computed"))
    answered_ns: int = _count_time("request", "Time of answered requests, from arrival to answer")
    queued_ns: int = _count_time("queue", "Time that answered requests waited for a slot")
    computed_ns: int = _count_time("compute_infer", "Time of the batches that answered requests were in")
    statuses: Counter[int] = declare(*_BY_STATUS, make=Counter)
    request_s: Histogram = _observe("shoal_request_duration_seconds", "Answered requests, from arrival to answer")
    compared: int = _count_shadow(
        "compared", "Requests that this version computed in addition to the one that answered"
    )
    disagreed: int = _count_shadow("disagreed", "Shadowed requests whose outputs differed")
    shadow_failed: int = _count_shadow("failed", "Shadowed requests that this version failed at")
    columns: Mapping[str, Mapping[str, int]] = declare(
        Metric(
            "shoal_column_values_total",
            "Values of a table's column that training has not seen: gap, unknown (refused), beyond the range",
            labels=("column", "what"),
        ),
        make=dict,
    )
    failed_on_both: int = 0
    failed_ns: int = 0
    sizes: dict[int, tuple[int, int]] = field(default_factory=dict)
    last_ms: int = declare(merge=max)
    used: int = declare(merge=max)

    @property
    def requests(self) -> int:
        """The requests given to it, shadowed ones too."""
        return sum(self.statuses.values()) + self.compared + self.shadow_failed

    @property
    def errors(self) -> int:
        """Those that ended with a 5xx of its making."""
        return sum(num for status, num in self.statuses.items() if status >= 500) + self.shadow_failed


@dataclass(slots=True)
class ModelCounts:
    """One model on one replica, or on several (`merge`).

    live:     its versions come from a run, not from the registry: metrics then have no version number
    serving:  the version that answers, by track; 0 for none. `percent` is the candidate's part of the requests
    older:    of versions that have no counts of their own any more
    refused:  by HTTP status, requests refused before a version was chosen
    others:   of libraries, by name
    """

    live: bool = declare(merge=itemgetter(0))
    pending: int = declare(Metric("nv_inference_pending_request_count", "Requests that wait for a slot", "gauge"))
    serving: Mapping[str, int] = declare(
        Metric(
            "shoal_serving_version",
            "The version that answers, by track (stable, candidate); 0 for none",
            "gauge",
            ("track",),
        ),
        make=lambda: {"stable": 0, "candidate": 0},
        merge=itemgetter(0),
    )
    percent: float = declare(
        Metric("shoal_candidate_percent", "The candidate's part of the requests", "gauge"), merge=itemgetter(0)
    )
    swaps: int = declare(Metric("shoal_swaps_total", "Changes of the stable version"), merge=max)
    queue_s: Histogram = _observe("shoal_queue_duration_seconds", "Answered requests, while they waited for a slot")
    compute_s: Histogram = _observe("shoal_batch_duration_seconds", "Batches, while they were computed")
    batch_rows: Histogram = _observe("shoal_batch_rows", "Rows of a batch", ROWS)
    refused: Counter[int] = declare(*_BY_STATUS, make=Counter)
    versions: dict[int, VersionCounts] = field(default_factory=dict)
    older: VersionCounts = field(default_factory=VersionCounts)
    others: Mapping[str, LibraryMetric] = field(default_factory=dict)

    def sum_requests(self) -> VersionCounts:
        """The statuses and rows of what all versions were asked, and nothing else of them."""
        versions = [self.older, *self.versions.values()]
        statuses = merge([each.statuses for each in versions])
        return VersionCounts(rows=sum(each.rows for each in versions), statuses=statuses)

    def sum_versions(self) -> VersionCounts:
        """Sum all versions of a model, also those no longer listed separately."""
        return merge([self.older, *self.versions.values()])
