"""The Trainer's metrics and events, from rank 0 alone.

`EventLog` receives them: into the run record when this process writes it, into a mailbox when the driver does
(`runs.ray_event_channel`), and nowhere on other ranks. Called by the Trainer; never answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, Protocol

import numpy as np

from shoal.errors import RecordUnwritable
from shoal.runs.record.recorder import RunRecorder

LogMethod = Literal["log", "record_event", "log_histogram"]


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


class MessageLog(ABC):
    """An event log whose calls become messages: the name of the method, its arguments and an event's details."""

    @abstractmethod
    def send(self, method: LogMethod, /, *arguments: Any, **details: Any) -> None:
        """Pass one on."""

    def log(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        self.send("log", step, dict(values), at)

    def record_event(self, kind: str, /, **details: object) -> None:
        self.send("record_event", kind, **details)

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        self.send("log_histogram", step, name, counts, edges)

    def flush(self) -> None:  # noqa: B027 - most have nothing that waits
        """As EventLog says."""


class NullLog(MessageLog):
    """The event log of ranks that write nothing."""

    def send(self, method: LogMethod, /, *arguments: Any, **details: Any) -> None:
        """Nothing."""


class ForwardingLog(MessageLog):
    """Passes everything on to another log."""

    def __init__(self, log: EventLog) -> None:
        self._event_log = log

    def send(self, method: LogMethod, /, *arguments: Any, **details: Any) -> None:
        getattr(self._event_log, method)(*arguments, **details)

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
