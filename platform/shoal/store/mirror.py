"""The thread that brings what is new from one place to another.

Owns when that is tried, and again, and what is known of the last attempt. Called by the mirrors of runs, checkpoints,
experience and demonstrations, and by the publisher of weights: each knows what there is to bring, and where.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from shoal.errors import ShoalError, summarize_error

RETRY_S = 1.0

_log = logging.getLogger(__name__)


class Mirror:
    """Calls `bring` in a thread: after `wake`, every `interval_s`, and `retry_s` after an error, until it succeeds.

    bring:   brings all that is new. Raises OSError or ShoalError while that is not possible. False: it is never called
             again, since what it writes to is another process's now
    warning: what to log with the first error after a success; "": nothing, since the caller reports `problem`

    | capacity         | what blocks      | who unblocks           | close()                          |
    |------------------|------------------|------------------------|----------------------------------|
    | what `bring` has | `flush`, `close` | `bring`, or a timeout  | brings the rest, ends the thread |

    problem: why the last call has failed; "" if it has not
    """

    def __init__(
        self,
        name: str,
        bring: Callable[[], bool | None],
        interval_s: float | None = None,
        retry_s: float = RETRY_S,
        warning: str = "",
    ) -> None:
        self.problem = ""
        self._bring, self._warning = bring, warning
        self._interval_s, self._retry_s = interval_s, retry_s
        self._changed = threading.Condition()  # guards the following
        self._num_wanted = self._num_brought = 0  # calls of `wake`, all and those that a call of `bring` has followed
        self._is_closing = False
        self._last_try_s = math.inf  # by `time.monotonic`: what fails later is not tried again
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it still brings anything."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """There is something new."""
        with self._changed:
            self._num_wanted += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Bring what is new by now. Whether that has succeeded in time."""
        self.wake()
        number = self._num_wanted
        with self._changed:
            return self._changed.wait_for(lambda: self._num_brought >= number, timeout_s)

    def close(self, timeout_s: float = threading.TIMEOUT_MAX, *, is_patient: bool = False) -> bool:
        """Bring the rest; whether that has ended in time. Idempotent.

        is_patient: after an error it is tried again until then
        """
        with self._changed:
            self._is_closing = True
            self._last_try_s = time.monotonic() + timeout_s * is_patient
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self.is_alive

    def _run(self) -> None:
        is_over = False
        while not is_over:
            with self._changed:
                if not self.problem:
                    self._changed.wait_for(
                        lambda: self._is_closing or self._num_wanted > self._num_brought, self._interval_s
                    )
                number, is_last = self._num_wanted, self._is_closing
            try:
                is_over = self._bring() is False or is_last
            except Exception as error:
                if self._warning and not self.problem:
                    _log.warning("%s: %s", self._warning, error)
                self.problem = summarize_error(error, max_chars=None)
                if not isinstance(error, ShoalError | OSError):  # a bug: to call it again may do harm
                    raise
                if not is_last:
                    with self._changed:
                        self._changed.wait_for(lambda: self._is_closing, self._retry_s)
                elif time.monotonic() < self._last_try_s:
                    time.sleep(self._retry_s)
                else:
                    return
            else:
                self.problem = ""
                with self._changed:
                    self._num_brought = number
                    self._changed.notify_all()
