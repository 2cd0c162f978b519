"""A replica's counts of each model: requests, rows, batches and times, by version, and as histograms.

One per model, made and written by `ServedModel`, on the event loop (`count_request`) and in the batcher's forward
threads (`count_batch`); read by the statistics extension, by `prometheus`, and by the guard of a rollout. Counts only
rise while the process lives. What is counted is declared in `serve.messages.counts`.

A live model may see twenty versions a second: the last `MAX_VERSIONS` used have separate counts, and those of older
ones are summed under `older`, so that no count is lost and memory does not grow.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from shoal.open_inference.messages import BatchStatistics, Duration, InferenceStatistics, VersionStatistics
from shoal.serve.messages.counts import ModelCounts, VersionCounts, merge
from shoal.serve.messages.replica_report import MAX_FORWARDS, ForwardMedians

if TYPE_CHECKING:
    from shoal.batching.batcher import Batch

MAX_VERSIONS = 32


class ModelStatistics:
    """The counts of one model on this replica.

    live:    its versions come from a run, not from the registry
    pending: the number of requests that wait for a slot now
    """

    def __init__(self, name: str, *, live: bool = False, pending: Callable[[], int] = lambda: 0) -> None:
        self.name, self.pending = name, pending
        self._lock = threading.Lock()  # between forward threads and the thread that adds a version
        self._counts = ModelCounts(live)
        self._versions = self._counts.versions
        self._uses = 0

    def count_request(
        self, version: int, status: int, seconds: float, queued_s: float = 0.0, computed_s: float = 0.0, rows: int = 0
    ) -> None:
        """Count a request answered with HTTP `status`, `seconds` after its arrival; version 0 stands for none."""
        if version == 0:
            self._counts.refused[status] += 1
            return
        counts = self._get_counts(version)
        counts.statuses[status] += 1
        if status != 200:
            counts.failed_ns += int(seconds * 1e9)
            return
        counts.answered += 1
        counts.answered_ns += int(seconds * 1e9)
        counts.queued_ns += int(queued_s * 1e9)
        counts.computed_ns += int(computed_s * 1e9)
        counts.rows += rows
        counts.last_ms = time.time_ns() // 1_000_000
        counts.request_s.observe(seconds)
        self._counts.queue_s.observe(queued_s)

    def count_batch(self, batch: Batch[Any]) -> None:
        """Count a batch under its version. Called by forward threads."""
        counts = self._get_counts(batch.version)
        with self._lock:
            counts.batches += 1
            count, ns = counts.sizes.get(batch.rows, (0, 0))
            counts.sizes[batch.rows] = count + 1, ns + int(batch.computed_s * 1e9)
            self._counts.compute_s.observe(batch.computed_s)
            self._counts.batch_rows.observe(batch.rows)

    def count_columns(self, version: int, found: Mapping[str, Mapping[str, int]]) -> None:
        """Count what training has not seen in a table's columns (`column_drift`). Called by forward threads."""
        if found:
            counts = self._get_counts(version)
            with self._lock:
                counts.columns = merge([counts.columns, found])

    def set_serving(self, stable: int, candidate: int = 0, percent: float = 0.0) -> None:
        """Record that `stable` answers from now on, and `candidate`, when not 0, `percent` of the requests."""
        counts = self._counts
        if stable != counts.serving["stable"]:
            counts.swaps += 1
        counts.serving, counts.percent = {"stable": stable, "candidate": candidate}, percent

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
        counts = [self._counts.older, *self._versions.values()]
        return sum(sum(each.statuses.values()) for each in counts)

    def list_statistics(self, versions: Iterable[int]) -> list[VersionStatistics]:
        counted, nothing = self.snapshot().versions, VersionCounts()
        return [_describe(self.name, version, counted.get(version, nothing)) for version in versions]

    def snapshot(self) -> ModelCounts:
        """All counts until now; a request that is being answered may be partly included."""
        with self._lock:
            self._counts.pending = self.pending()
            return merge([self._counts])

    def _get_counts(self, version: int) -> VersionCounts:
        self._uses += 1
        counts = self._versions.get(version)
        if counts is None:
            with self._lock:
                counts = self._versions.setdefault(version, VersionCounts())
                counts.used = self._uses
                if len(self._versions) > MAX_VERSIONS:
                    oldest = min(self._versions, key=lambda each: self._versions[each].used)
                    self._counts.older = merge([self._counts.older, self._versions.pop(oldest)])
        counts.used = self._uses
        return counts


def _describe(name: str, version: int, counts: VersionCounts) -> VersionStatistics:
    answered, failed = counts.answered, sum(counts.statuses.values()) - counts.answered
    return VersionStatistics(
        name,
        str(version),
        counts.last_ms,
        counts.rows,
        counts.batches,
        InferenceStatistics(
            success=Duration(answered, counts.answered_ns),
            fail=Duration(failed, counts.failed_ns),
            queue=Duration(answered, counts.queued_ns),
            compute_infer=Duration(answered, counts.computed_ns),
        ),
        [BatchStatistics(rows, compute_infer=Duration(*size)) for rows, size in sorted(counts.sizes.items())],
    )


class ForwardTimes:
    """The times of each version's newest forwards by batch size, which a guard compares.

    Written by forward threads, read on the event loop. Bounded: `MAX_FORWARDS` times for each version and size.
    """

    def __init__(self) -> None:
        self._times: dict[int, dict[int, deque[float]]] = {}  # version -> size class -> seconds

    def add(self, version: int, rows: int, seconds: float) -> None:
        size = rows.bit_length() - 1
        by_size = self._times.setdefault(version, {})
        if (times := by_size.get(size)) is None:
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
