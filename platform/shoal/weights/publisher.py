"""The producer's end of a weight store that lives elsewhere: publish, and never wait for the way there.

Owns one slot and one thread. Called by learners through a transport's shell (`ray_weights`); knows no transport itself:
it is given `send`, and `stored_version` to notice that a restarted store has forgotten what it was sent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from shoal.errors import Closed, ConnectionLost
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
        self._send = send
        self._stored_version = stored_version
        self._check_s = check_s
        self._retry_s = retry_s
        self._changed = threading.Condition()
        self._last: WeightSnapshot | None = None
        self.forwarded_version = 0  # the newest that the store has acknowledged; 0 also when it lost that
        self._close_deadline = 0.0  # time.monotonic(); 0 while open
        self._thread = threading.Thread(target=self._run, name="shoal-publish", daemon=True)
        self._thread.start()

    def publish(self, snapshot: WeightSnapshot) -> None:
        """Hand a version over; returns at once. Raises Closed after close()."""
        with self._changed:
            if self._close_deadline:
                raise Closed("the weight publisher is closed")
            self._last = snapshot
            self._changed.notify()

    def close(self, timeout_s: float = 10.0) -> None:
        """Forward what is left, for at most `timeout_s`, and end the thread. Idempotent."""
        with self._changed:
            self._close_deadline = self._close_deadline or time.monotonic() + timeout_s
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        is_away = False
        while True:
            with self._changed:
                if not self._close_deadline and not self._pending():
                    self._changed.wait(self._check_s)
                pending = self._pending()
                if self._close_deadline and (pending is None or time.monotonic() > self._close_deadline):
                    if pending is not None:
                        logger.warning("weights version %d was not forwarded: the store is away", pending.version)
                    return
            try:
                if pending is not None:
                    self._send(pending)
                    self.forwarded_version = pending.version
                elif self._last is not None and self._stored_version() < self._last.version:
                    self.forwarded_version = 0  # the store was restarted: send it again
                is_away = False
            except ConnectionLost as error:
                if not is_away:
                    logger.warning("weights are not forwarded, and will be: %s", error)
                is_away = True
                with self._changed:
                    self._changed.wait(self._retry_s)

    def _pending(self) -> WeightSnapshot | None:
        last = self._last
        return last if last is not None and last.version > self.forwarded_version else None
