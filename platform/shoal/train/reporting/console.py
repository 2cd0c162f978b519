"""A training run in lines of text: progress and problems.

Called by `python -m shoal.train` and the job. Only writes lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from shoal.runs.event_messages import format_warning
from shoal.runs.formatting import format_metrics
from shoal.runs.record.event_log import EventLog, ForwardingLog

INTERVAL_S = 2.0


class ConsoleLog(ForwardingLog):
    """An event log that also prints: every evaluation, every problem, and from time to time the progress."""

    def __init__(self, journal: EventLog, say: Callable[[str], None]) -> None:
        super().__init__(journal)
        self._say = say
        self._printed_at_s = time.monotonic()

    def log(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        super().log(step, values, at)
        if at is not None:
            return  # printed when it was measured
        is_evaluation = any(name.startswith("validation/") for name in values)
        if is_evaluation or time.monotonic() - self._printed_at_s >= INTERVAL_S:
            self._printed_at_s = time.monotonic()
            self._say(f"step {step:6,} | {format_metrics(values)}")

    def record_event(self, kind: str, /, **details: object) -> None:
        super().record_event(kind, **details)
        if words := format_warning(kind, details):
            self._say(words)
