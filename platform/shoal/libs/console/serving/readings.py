"""What is slow to read, read every two seconds for all pages: an endpoint's status, a cluster.

A page never waits long: it gets the newest reading, with its age, or why there is none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from shoal.errors import ShoalError

PERIOD_S = 1.9  # a page asks every second; more often would cost an endpoint more than 1% of its requests
PATIENCE_S, FIRST_PATIENCE_S = 0.3, 3.0  # how long a page waits for a newer reading, and for the first one
T = TypeVar("T")


class SharedReading(Generic[T]):
    """The newest result of `read`, which raises ShoalError for what cannot be read now. Any thread may ask.

    A reading is made, in a thread, when somebody asks and the last one is older than two seconds: one at a time,
    however long it takes and however many ask.

    value: of the last reading that succeeded; None before that
    problem: why the last one did not; "" if it did
    read_at: when `value` was read, Unix time
    """

    def __init__(self, read: Callable[[], T]) -> None:
        self._read, self._lock = read, threading.Lock()
        self._started_s = -PERIOD_S
        self._done = threading.Event()
        self._done.set()
        self.value: T | None = None
        self.problem, self.read_at = "", 0.0

    def begin(self) -> None:
        """Begin a reading, unless there is a fresh one or one in progress."""
        with self._lock:
            now_s = time.monotonic()
            if not self._done.is_set() or now_s - self._started_s < PERIOD_S:
                return
            self._started_s = now_s
            self._done.clear()
        threading.Thread(target=self._run, name="console-reading", daemon=True).start()

    def wait(self) -> T | None:
        """The newest value, of a reading that has begun if that ends soon."""
        wait_for_all([self])
        return self.value

    def get(self) -> T | None:
        """`begin` and `wait`."""
        self.begin()
        return self.wait()

    def forget(self) -> None:
        """The next one who asks gets a new reading: something has been changed."""
        self._started_s = -PERIOD_S

    def _run(self) -> None:
        try:
            self.value = self._read()
            self.problem = ""
            self.read_at = time.time()
        except ShoalError as error:
            self.problem = str(error)
        finally:
            self._done.set()


def wait_for_all(readings: Sequence[SharedReading[Any]]) -> None:
    """Until all that have begun have ended, or as long as a page waits: for all of them together."""
    is_first = any(not (each.read_at or each.problem) for each in readings)
    end_s = time.monotonic() + (FIRST_PATIENCE_S if is_first else PATIENCE_S)
    for each in readings:
        each._done.wait(max(0.0, end_s - time.monotonic()))
