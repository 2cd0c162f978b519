"""What a Trainer tells the outside while it runs: metrics and events, from rank 0 alone.

`EventLog` is where they go: into the run record when this process writes it, into a mailbox when the driver does
(ray_mailbox.py), nowhere on other ranks. Called by the Trainer; never answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

import numpy as np

from shoal.errors import RecordUnwritable
from shoal.runs import RunRecorder


class EventLog(Protocol):
    """Receives what happens in a run. Every method but `flush` returns at once."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics of one step."""
        ...

    def record_event(self, kind: str, /, **details: object) -> None:
        """Something happened; details are JSON-able."""
        ...

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        """A distribution at one step: counts [bins] between edges [bins + 1]."""
        ...

    def flush(self) -> None:
        """What was said so far must outlive this process, before a checkpoint does: nobody says it again.

        Raises RunError when another process has resumed the run.
        """
        ...


class NullLog:
    """The journal of ranks that write nothing."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Nothing."""

    def record_event(self, kind: str, /, **details: object) -> None:
        """Nothing."""

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""


class RecordLog:
    """Straight into the run record, which this process writes."""

    def __init__(self, recorder: RunRecorder) -> None:
        self._recorder = recorder

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with suppress(RecordUnwritable):  # no room is left in memory: these are lost, and training goes on
            self._recorder.log(step, values)

    def record_event(self, kind: str, /, **details: object) -> None:
        """A life that begins takes back what an earlier one has logged of the steps that it will do again."""
        if kind == "training":
            step = details["step"]
            assert isinstance(step, int)
            with suppress(RecordUnwritable):
                self._recorder.forget_after(step)
        with suppress(RecordUnwritable):  # it is kept, and tried again: training goes on
            self._recorder.record_event(kind, **details)

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        self._recorder.log_histogram(step, name, counts, edges)

    def flush(self) -> None:
        with suppress(RecordUnwritable):  # not when another process has resumed the run: it is no longer ours to save
            self._recorder.flush()
