"""A loop of steps that other threads may pause and stop. Called by the learner; knows nothing of learning."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from shoal.errors import Closed

T = TypeVar("T")


class PausableLoop:
    """Calls `step` until `stop`. Other threads may pause it between two steps."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step
        self._stopping, self._running = threading.Event(), threading.Event()
        self._running.set()
        self._step_lock = threading.Lock()  # held during a step of `run`

    def run(self) -> None:
        """Step until `stop`, in the caller's thread."""
        while not self._stopping.is_set():
            if self._running.wait(timeout=0.1):
                with self._step_lock:
                    if self._running.is_set():  # `pause` may have come in between
                        self._step()

    def stop(self) -> None:
        """End `run` after the current step. Idempotent."""
        self._stopping.set()

    def pause(self, prepare: Callable[[], T | None], interval_s: float) -> T:
        """Wait for the current step; then no other is taken until `resume`. Returns what `prepare` returns, which is
        called again after `interval_s` while that is None. Raises Closed when the loop is stopped before."""
        self._running.clear()
        while not self._stopping.is_set():
            with self._step_lock:
                if (prepared := prepare()) is not None:
                    return prepared
            self._stopping.wait(interval_s)
        raise Closed("the learner was stopped")

    def resume(self) -> None:
        self._running.set()

    def wait(self, timeout_s: float) -> None:
        """Return after this time, or when the loop is stopped."""
        self._stopping.wait(timeout_s)
