"""The producer's end of a weight store that lives elsewhere: publish, and never wait for the way there.

Owns one slot. Called by learners through a transport's shell (`ray_weights`); knows no transport itself:
it is given `send`, and `stored_version` to notice that a restarted store has forgotten what it was sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from shoal.errors import Closed
from shoal.store import Mirror
from shoal.weights.store import WeightSnapshot

logger = logging.getLogger(__name__)


class WeightPublisher:
    """Forwards the newest snapshot, one at a time; what it is too slow for is skipped, as the store would.

    send:           hands a snapshot to the store. Raises ConnectionLost when the store is away.
    stored_version: the version that the store has, 0 for none. Raises ConnectionLost too.
    check_s:        how often the store is asked whether it still has the last snapshot; it gets it again if not
    retry_s:        the pause after the store was away

    | capacity | what blocks                            | who unblocks | close()                                     |
    |----------|----------------------------------------|--------------|---------------------------------------------|
    | 1        | nothing: newer replaces what waits     | -            | forwards the last within timeout_s, ends    |
    """

    def __init__(
        self,
        send: Callable[[WeightSnapshot], None],
        stored_version: Callable[[], int],
        check_s: float = 1.0,
        retry_s: float = 0.2,
    ) -> None:
        self._send, self._stored_version = send, stored_version
        self._last: WeightSnapshot | None = None
        self.forwarded_version = 0  # the newest that the store has acknowledged; 0 also when it lost that
        self._is_closed = False
        warning = "weights are not forwarded, and will be"
        self._mirror = Mirror("shoal-publish", self._forward, check_s, retry_s, warning)

    def publish(self, snapshot: WeightSnapshot) -> None:
        """Hand a version over; returns at once. Raises Closed after close()."""
        if self._is_closed:
            raise Closed("the weight publisher is closed")
        self._last = snapshot
        self._mirror.wake()

    def close(self, timeout_s: float = 10.0) -> None:
        """Forward what is left, for at most `timeout_s`, and end the thread. Idempotent."""
        self._is_closed = True
        self._mirror.close(timeout_s, is_patient=True)
        if self._last is not None and self._last.version > self.forwarded_version:
            logger.warning("weights version %d was not forwarded: the store is away", self._last.version)

    def _forward(self) -> None:
        last = self._last
        if last is None:
            return
        has_all = last.version <= self.forwarded_version
        if has_all and not self._is_closed and self._stored_version() < last.version:
            self.forwarded_version = 0  # the store was restarted: send it again
        if last.version > self.forwarded_version:
            self._send(last)
            self.forwarded_version = last.version
