"""The times of each version's newest forwards by batch size, which a guard compares.

Written by the batcher's threads, read on the event loop when the replica reports. Bounded: `MAX_FORWARDS` times for
each version and size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from shoal.serve.messages.replica_report import MAX_FORWARDS, ForwardMedians


class ForwardTimes:
    """The forward times of one model."""

    def __init__(self) -> None:
        self._times: dict[int, dict[int, deque[float]]] = {}  # version -> size class -> seconds

    def add(self, version: int, rows: int, seconds: float) -> None:
        """Add a forward of `version` over `rows` rows."""
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
