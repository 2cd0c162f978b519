"""The thread that keeps a model on the newest weights: wait for a newer version, stage it, flip.

Owned by the endpoint's replica. Never touches a request: the flip takes effect with the next batch. Weights that do not
fit are reported and skipped; the version that serves goes on serving.
"""

from __future__ import annotations

import logging
import threading

from shoal.errors import Closed, RegistryError, WeightsError
from shoal.serve.versions import Versions
from shoal.weights import WeightSource

logger = logging.getLogger(__name__)


class WeightFollower:
    """Follows `source` until close(). `rejected` is the newest version that did not fit, 0 when none."""

    def __init__(self, source: WeightSource, versions: Versions, poll_s: float = 1.0) -> None:
        self._source, self._versions, self._poll_s = source, versions, poll_s
        self.rejected = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-weights", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether newer weights would still be noticed."""
        return self._thread.is_alive()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop following; waits up to `timeout_s` for the thread. Idempotent."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        given = 0  # what the source gave last: an alias may move back, so numbers are not compared
        while not self._stop.is_set():
            try:
                snapshot = self._source.wait_newer(given, self._poll_s)
            except Closed:
                return
            except (WeightsError, RegistryError) as error:
                logger.error("no weights, version %d goes on serving: %s", self._versions.version, error)
                self._stop.wait(self._poll_s)
                continue
            if snapshot is None:
                continue
            given = snapshot.version
            try:
                self._versions.stage(snapshot)
            except WeightsError as error:
                self.rejected = snapshot.version
                logger.error("weights refused, version %d goes on serving: %s", self._versions.version, error)
            else:
                logger.info("serving weights version %d", self._versions.flip())
