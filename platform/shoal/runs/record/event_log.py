"""The Trainer's metrics and events, from rank 0 alone.

`EventLog` receives them: into the run record when this process writes it, into a mailbox when the driver does
(`runs.ray_event_channel`), and nowhere on other ranks. Called by the Trainer; never answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from shoal.errors import RecordUnwritable
from shoal.runs.record.recorder import RunRecorder

LogMethod = Literal["log", "record_event", "log_histogram"]


class EventLog:
    """Receives a run's metrics and events. Every method but `flush` returns at once.

    Each call becomes a message: the name of the method, its arguments and an event's details.
    """

    def send(self, method: LogMethod, /, *arguments: Any, **details: Any) -> None:
        """Pass one on; here to nowhere."""

    def log(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        """Log metrics of one step. at: when they were measured, if not now; Unix time in seconds."""
        self.send("log", step, dict(values), at)

    def record_event(self, kind: str, /, **details: object) -> None:
        """Record an event; details are JSON-able."""
        self.send("record_event", kind, **details)

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        """Log a distribution at one step: counts [bins] between edges [bins + 1]."""
        self.send("log_histogram", step, name, counts, edges)

    def flush(self) -> None:
        """Make all earlier records outlive this process, before a checkpoint does: a resumed run does not repeat them.

        Here nothing: most have nothing that waits. Raises RunError when another process has resumed the run.
        """


class NullLog(EventLog):
    """The event log of ranks that write nothing."""


class ForwardingLog(EventLog):
    """Passes everything on to another log."""

    def __init__(self, log: EventLog) -> None:
        self._event_log = log

    def send(self, method: LogMethod, /, *arguments: Any, **details: Any) -> None:
        getattr(self._event_log, method)(*arguments, **details)

    def flush(self) -> None:
        self._event_log.flush()


class RecordLog(EventLog):
    """Writes to the run record of this process. What it cannot take now is lost, or retried later: training goes on.

    on_begin: called when the workers begin to train, in each attempt
    """

    def __init__(self, recorder: RunRecorder, on_begin: Callable[[], None] | None = None) -> None:
        self._recorder, self._on_begin = recorder, on_begin

    def send(self, method: LogMethod, /, *arguments: Any, **details: Any) -> None:
        with suppress(RecordUnwritable):
            getattr(self._recorder, method)(*arguments, **details)

    def record_event(self, kind: str, /, **details: object) -> None:
        """Remove an earlier attempt's metrics of steps that this attempt will repeat."""
        if kind in ("training", "population"):
            if self._on_begin is not None:
                self._on_begin()
            step = details["step"]
            assert isinstance(step, int)
            with suppress(RecordUnwritable):
                self._recorder.forget_after(step)
        super().record_event(kind, **details)

    def flush(self) -> None:
        with suppress(RecordUnwritable):  # another error, a run resumed by another process, is raised: do not save then
            self._recorder.flush()
