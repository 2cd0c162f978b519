"""The versions that a learner publishes: each has a number that no other version of the run ever had.

Called by the learner. Knows no algorithm.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np

from shoal import atomic_file
from shoal.weights import PublishedVersion, Skipped, WeightSnapshot, measure_lag

VERSIONS_RESERVED = 50  # at a time, on disk
MAX_UNRECORDED = 10_000
MAX_LISTED = 200  # of them, on disk: each publication writes these


class WeightSink(Protocol):
    """Where a learner publishes. Implemented by WeightStore and by WeightPublisher; never waits for a consumer."""

    def publish(self, snapshot: WeightSnapshot) -> object: ...


class PublishedVersions:
    """Reserves numbers on disk before it uses them, so a learner that restarts begins above all that were used. The
    numbers between its checkpoint's version and the first new one do not count as lag.

    path:       of the file with the largest reserved number; beside it lies what was published and not yet recorded
    after:      the newest version is above this number, and above each reserved one where `is_known` is false
    restored:   the version of the checkpoint that the learner goes on from; 0: it begins
    skipped:    in earlier restarts: see `weights.measure_lag`
    version:    the newest number
    updates:    of the learner, in the newest version
    """

    def __init__(
        self,
        sink: WeightSink,
        path: Path,
        after: int,
        is_known: bool,
        updates: int = 0,
        restored: int = 0,
        skipped: Skipped = (),
    ) -> None:
        self._sink, self._path = sink, path
        self._num_reserved = int(path.read_text()) if path.exists() else 0
        self.version = after if is_known else max(after, self._num_reserved)
        has_skipped = 0 < restored < self.version
        self.skipped = (*skipped, (restored, self.version)) if has_skipped else skipped
        self.updates, self._published_at = updates, -math.inf
        self._list_path = path.with_name(f"{path.name}-unrecorded")
        listed = json.loads(self._list_path.read_text()) if self._list_path.exists() else []
        self._unrecorded = deque([PublishedVersion(*each) for each in listed], maxlen=MAX_UNRECORDED)
        self._lock = threading.Lock()  # of the list

    def publish(self, weights: Mapping[str, np.ndarray], updates: int, steps: int) -> None:
        """Raises OSError, without publishing, when no number can be reserved."""
        if self.version + 1 > self._num_reserved:
            num_reserved = self.version + 1 + VERSIONS_RESERVED
            atomic_file.replace_synced(self._path, str(num_reserved).encode())
            self._num_reserved = num_reserved
        snapshot = WeightSnapshot.of(self.version + 1, weights, self.skipped)
        published = PublishedVersion(snapshot.version, steps, snapshot.sha256, snapshot.published_at)
        with self._lock:
            self._list([*self._unrecorded, published])  # first: a learner that is killed leaves no version out
        self.version += 1
        self.updates, self._published_at = updates, time.monotonic()
        self._sink.publish(snapshot)

    def measure_lag(self, versions: np.ndarray) -> np.ndarray:
        """How many publications the newest version is ahead of others."""
        return measure_lag(self.version, versions, self.skipped)

    def is_due(self, interval_s: float) -> bool:
        """Whether the newest version is as old as this."""
        return time.monotonic() - self._published_at >= interval_s

    def take(self, after: int) -> list[PublishedVersion]:
        """Those above the number `after`; those up to it are recorded."""
        with self._lock:
            left = [each for each in self._unrecorded if each.version > after]
            if len(left) < len(self._unrecorded):
                with suppress(OSError):  # a full disk: the next call removes them
                    self._list(left)
            return left

    def _list(self, unrecorded: Sequence[PublishedVersion]) -> None:
        draft = self._list_path.with_suffix(".draft")
        draft.write_text(json.dumps(unrecorded[-MAX_LISTED:]))
        draft.replace(self._list_path)  # unsynced: only its learner's death is survived
        self._unrecorded = deque(unrecorded, maxlen=MAX_UNRECORDED)
