"""A replica's counts of each model: requests, rows, batches and times, by version, and as histograms.

One per model, made and written by `ServedModel`, on the event loop (`count_request`) and in the batcher's forward
threads (`count_batch`); read by the statistics extension, by `prometheus`, and by the guard of a rollout. Counts only
rise while the process lives. Renders nothing, and knows no HTTP.

A live model may see twenty versions a second: the last `MAX_VERSIONS` used have separate counts, and those of older
ones are summed under `older`, so that no count is lost and memory does not grow.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.open_inference.messages import VersionStatistics
from shoal.serve.messages.metrics_snapshot import (
    ActiveVersions,
    ColumnValues,
    HistogramSnapshot,
    ModelSnapshot,
    VersionSnapshot,
    add_columns,
    add_versions,
)
from shoal.serve.messages.replica_report import MAX_FORWARDS, ForwardMedians

if TYPE_CHECKING:
    from shoal.batching.batcher import Batch

MAX_VERSIONS = 32
SECONDS = tuple(0.00025 * 2**power for power in range(17))  # 0.25 ms to 16.4 s, each twice the one before
ROWS = tuple(float(2**power) for power in range(11))  # 1 to 1024


class Histogram:
    """Counts values between ascending bounds."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> HistogramSnapshot:
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}


@dataclass(slots=True)
class _VersionCounts:
    """The counts of one version. Forward threads write `batches`, `sizes` and `columns`, the event loop the rest.

    sizes: by rows of a batch: (batches, ns)
    """

    batches: int = 0
    compared: int = 0
    compute_ns: int = 0
    disagreed: int = 0
    fail: int = 0
    fail_ns: int = 0
    failed_on_both: int = 0
    queue_ns: int = 0
    rows: int = 0
    shadow_failed: int = 0
    success: int = 0
    success_ns: int = 0
    last_ms: int = 0
    used: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    sizes: dict[int, tuple[int, int]] = field(default_factory=dict)
    columns: ColumnValues = field(default_factory=dict)  # replaced, never changed
    request_s: Histogram = field(default_factory=lambda: Histogram(SECONDS))

    def snapshot(self) -> VersionSnapshot:
        return {
            "last_inference": self.last_ms,
            "inference_count": self.rows,
            "execution_count": self.batches,
            "inference_stats": {
                "success": {"count": self.success, "ns": self.success_ns},
                "fail": {"count": self.fail, "ns": self.fail_ns},
                "queue": {"count": self.success, "ns": self.queue_ns},
                "compute_infer": {"count": self.success, "ns": self.compute_ns},
            },
            "batch_stats": [
                {"batch_size": rows, "compute_infer": {"count": count, "ns": ns}}
                for rows, (count, ns) in sorted(self.sizes.copy().items())
            ],
            "statuses": _by_status(self.statuses),
            "compared": self.compared,
            "disagreed": self.disagreed,
            "shadow_failed": self.shadow_failed,
            "failed_on_both": self.failed_on_both,
            "columns": self.columns,
            "request_s": self.request_s.snapshot(),
        }


class ModelStatistics:
    """The counts of one model on this replica.

    live:    its versions come from a run, not from the registry: metrics then have no version number
    pending: the number of requests that wait for a slot now
    """

    def __init__(self, name: str, *, live: bool = False, pending: Callable[[], int] = lambda: 0) -> None:
        self.name, self._live, self.pending = name, live, pending
        self._lock = threading.Lock()  # between forward threads and the thread that adds a version
        self._versions: dict[int, _VersionCounts] = {}
        self._older = _VersionCounts().snapshot()  # of those that have no counts any more
        self._uses = 0
        self._refused: Counter[int] = Counter()
        self._swaps = 0
        self._serving: ActiveVersions = {"stable": 0, "candidate": 0, "percent": 0.0}
        self._queue_s, self._compute_s = Histogram(SECONDS), Histogram(SECONDS)
        self._batch_rows = Histogram(ROWS)

    def count_request(
        self, version: int, status: int, seconds: float, queued_s: float = 0.0, computed_s: float = 0.0, rows: int = 0
    ) -> None:
        """Count a request answered with HTTP `status`, `seconds` after its arrival; version 0 stands for none."""
        if version == 0:
            self._refused[status] += 1
            return
        counts = self._get_counts(version)
        counts.statuses[status] += 1
        if status != 200:
            counts.fail += 1
            counts.fail_ns += int(seconds * 1e9)
            return
        counts.success += 1
        counts.success_ns += int(seconds * 1e9)
        counts.queue_ns += int(queued_s * 1e9)
        counts.compute_ns += int(computed_s * 1e9)
        counts.rows += rows
        counts.last_ms = time.time_ns() // 1_000_000
        counts.request_s.observe(seconds)
        self._queue_s.observe(queued_s)

    def count_batch(self, batch: Batch[Any]) -> None:
        """Count a batch under its version. Called by forward threads."""
        counts = self._get_counts(batch.version)
        with self._lock:
            counts.batches += 1
            count, ns = counts.sizes.get(batch.rows, (0, 0))
            counts.sizes[batch.rows] = count + 1, ns + int(batch.computed_s * 1e9)
            self._compute_s.observe(batch.computed_s)
            self._batch_rows.observe(batch.rows)

    def count_columns(self, version: int, found: Mapping[str, Mapping[str, int]]) -> None:
        """Count what training has not seen in a table's columns (`column_drift`). Called by forward threads."""
        if found:
            counts = self._get_counts(version)
            with self._lock:
                counts.columns = add_columns(counts.columns, found)

    def set_serving(self, stable: int, candidate: int = 0, percent: float = 0.0) -> None:
        """Record that `stable` answers from now on, and `candidate`, when not 0, `percent` of the requests."""
        if stable != self._serving["stable"]:
            self._swaps += 1
        self._serving = {"stable": stable, "candidate": candidate, "percent": percent}

    def count_shadow(self, version: int, disagreed: bool) -> None:
        """Count a request that another version answered and `version` computed too, and whether their outputs
        differed."""
        counts = self._get_counts(version)
        counts.compared += 1
        counts.disagreed += disagreed

    def count_shadow_failure(self, version: int) -> None:
        """Count a request that another version answered and that failed on `version`."""
        self._get_counts(version).shadow_failed += 1

    def excuse_failure(self, version: int) -> None:
        """Count a request, counted as failed, as one that fails on the version it is compared with, too."""
        self._get_counts(version).failed_on_both += 1

    @property
    def last_inference_ms(self) -> int:
        """When a request was answered last, in milliseconds since 1970; 0 for never."""
        return max((counts.last_ms for counts in self._versions.values()), default=0)

    @property
    def num_requests(self) -> int:
        """The number of requests that versions have answered or failed on."""
        older = self._older["inference_stats"]
        num_older = older["success"]["count"] + older["fail"]["count"]
        return num_older + sum(counts.success + counts.fail for counts in self._versions.values())

    def list_statistics(self, versions: Iterable[int]) -> list[VersionStatistics]:
        counted = self.snapshot()["versions"]
        nothing = _VersionCounts().snapshot()
        return [
            msgspec.convert(
                {**counted.get(str(version), nothing), "name": self.name, "version": str(version)}, VersionStatistics
            )
            for version in versions
        ]

    def snapshot(self) -> ModelSnapshot:
        """All counts until now; a request that is being answered may be partly included."""
        with self._lock:
            versions = {str(version): counts.snapshot() for version, counts in sorted(self._versions.items())}
            older = self._older
        return {
            "name": self.name,
            "live": self._live,
            "serving": self._serving,
            "swaps": self._swaps,
            "pending": self.pending(),
            "versions": versions,
            "older": older,
            "refused": _by_status(self._refused),
            "queue_s": self._queue_s.snapshot(),
            "compute_s": self._compute_s.snapshot(),
            "batch_rows": self._batch_rows.snapshot(),
        }

    def _get_counts(self, version: int) -> _VersionCounts:
        self._uses += 1
        counts = self._versions.get(version)
        if counts is None:
            with self._lock:
                counts = self._versions.setdefault(version, _VersionCounts())
                counts.used = self._uses
                if len(self._versions) > MAX_VERSIONS:
                    oldest = min(self._versions, key=lambda each: self._versions[each].used)
                    self._older = add_versions(self._older, self._versions.pop(oldest).snapshot())
        counts.used = self._uses
        return counts


class ForwardTimes:
    """The times of each version's newest forwards by batch size, which a guard compares.

    Written by forward threads, read on the event loop. Bounded: `MAX_FORWARDS` times for each version and size.
    """

    def __init__(self) -> None:
        self._times: dict[int, dict[int, deque[float]]] = {}  # version -> size class -> seconds

    def add(self, version: int, rows: int, seconds: float) -> None:
        size = rows.bit_length() - 1
        by_size = self._times.get(version)
        if by_size is None:
            by_size = self._times[version] = {}
        times = by_size.get(size)
        if times is None:
            times = by_size[size] = deque(maxlen=MAX_FORWARDS)
        times.append(seconds)

    def retain_medians(self, versions: Iterable[int]) -> dict[int, ForwardMedians]:
        """The medians of these versions; drops the times of others."""
        self._times = {version: self._times[version] for version in versions if version in self._times}
        return {
            version: self.get_medians(version) for version in list(self._times)
        }  # forward threads may add new versions meanwhile

    def get_medians(self, version: int) -> ForwardMedians:
        """The medians of one version. Callable from any thread."""
        by_size = self._times.get(version, {})
        return {size: (len(times), median(list(times))) for size, times in list(by_size.items())}


def _by_status(counts: Counter[int]) -> dict[str, int]:
    return {str(status): count for status, count in sorted(dict(counts).items())}
