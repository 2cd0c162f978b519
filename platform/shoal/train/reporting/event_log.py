"""The Trainer's metrics and events, from rank 0 alone.

`EventLog` receives them: into the run record when this process writes it, into a mailbox when the driver does
(`runs.ray_event_channel`), and nowhere on other ranks. Called by the Trainer; never answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

import numpy as np

from shoal.errors import RecordUnwritable
from shoal.runs import RunRecorder


class EventLog(Protocol):
    """Receives a run's metrics and events. Every method but `flush` returns at once."""

    def log(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        """Log metrics of one step. at: when they were measured, if not now; Unix time in seconds."""
        ...

    def record_event(self, kind: str, /, **details: object) -> None:
        """Record an event; details are JSON-able."""
        ...

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        """Log a distribution at one step: counts [bins] between edges [bins + 1]."""
        ...

    def flush(self) -> None:
        """Make all earlier records outlive this process, before a checkpoint does: a resumed run does not repeat them.

        Raises RunError when another process has resumed the run.
        """
        ...


class NullLog:
    """The event log of ranks that write nothing."""

    def log(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        """Nothing."""

    def record_event(self, kind: str, /, **details: object) -> None:
        """Nothing."""

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""


class ForwardingLog:
    """Passes everything on to another log."""

    def __init__(self, log: EventLog) -> None:
        self._event_log = log

    def log(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        self._event_log.log(step, values, at)

    def record_event(self, kind: str, /, **details: object) -> None:
        self._event_log.record_event(kind, **details)

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        self._event_log.log_histogram(step, name, counts, edges)

    def flush(self) -> None:
        self._event_log.flush()


class RecordLog:
    """Writes to the run record of this process.

    on_begin: called when the workers begin to train, in each attempt
    """

    def __init__(self, recorder: RunRecorder, on_begin: Callable[[], None] | None = None) -> None:
        self._recorder, self._on_begin = recorder, on_begin

    def log(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        with suppress(RecordUnwritable):  # the queue is full: these values are lost, and training goes on
            self._recorder.log(step, values, at=at)

    def record_event(self, kind: str, /, **details: object) -> None:
        """Remove an earlier attempt's metrics of steps that this attempt will repeat."""
        if kind in ("training", "population"):
            if self._on_begin is not None:
                self._on_begin()
            step = details["step"]
            assert isinstance(step, int)
            with suppress(RecordUnwritable):
                self._recorder.forget_after(step)
        with suppress(RecordUnwritable):  # retried later: training goes on
            self._recorder.record_event(kind, **details)

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        self._recorder.log_histogram(step, name, counts, edges)

    def flush(self) -> None:
        with suppress(RecordUnwritable):  # another error, a run resumed by another process, is raised: do not save then
            self._recorder.flush()
