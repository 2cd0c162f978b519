"""How long the newest forwards of each version took, by the size of their batch: what a guard compares.

Written by the batcher's threads, read on the event loop when the replica reports. Bounded: `MAX_FORWARDS` times for
each version and size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from shoal.serve.messages.replica_report import MAX_FORWARDS, ForwardMedians


class ForwardTimes:
    """Of one model."""

    def __init__(self) -> None:
        self._times: dict[int, dict[int, deque[float]]] = {}  # version -> size class -> seconds

    def add(self, version: int, rows: int, seconds: float) -> None:
        """A forward of `version` over `rows` rows."""
        size = rows.bit_length() - 1
        by_size = self._times.get(version)
        if by_size is None:
            by_size = self._times[version] = {}
        times = by_size.get(size)
        if times is None:
            times = by_size[size] = deque(maxlen=MAX_FORWARDS)
        times.append(seconds)

    def retain_medians(self, versions: Iterable[int]) -> dict[int, ForwardMedians]:
        """Of these versions; what is known of others is forgotten."""
        self._times = {version: self._times[version] for version in versions if version in self._times}
        return {
            version: self.get_medians(version) for version in list(self._times)
        }  # batches of new versions come meanwhile

    def get_medians(self, version: int) -> ForwardMedians:
        """Of one version. From any thread."""
        by_size = self._times.get(version, {})
        return {size: (len(times), median(list(times))) for size, times in list(by_size.items())}
