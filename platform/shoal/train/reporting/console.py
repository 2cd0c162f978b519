"""A training run in lines of text: how far it is, and what went wrong though it goes on.

Called by `python -m shoal.train` and the job. Writes nothing but lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from shoal.runs.report.event_messages import trouble
from shoal.train.reporting.event_log import Journal

EVERY_S = 2.0


def in_words(values: Mapping[str, float]) -> str:
    """Metrics, as a line ends with them."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


class Told:
    """A journal that says aloud what it passes on: every evaluation, all trouble, and now and then how far it is."""

    def __init__(self, journal: Journal, say: Callable[[str], None]) -> None:
        self._journal, self._say = journal, say
        self._said_at = time.monotonic()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._journal.log(step, values)
        is_evaluation = any(name.startswith("validation/") for name in values)
        if is_evaluation or time.monotonic() - self._said_at >= EVERY_S:
            self._said_at = time.monotonic()
            self._say(f"step {step:6,} | {in_words(values)}")

    def event(self, kind: str, /, **details: object) -> None:
        self._journal.event(kind, **details)
        if words := trouble(kind, details):
            self._say(words)

    def histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        self._journal.histogram(step, name, counts, edges)

    def flush(self) -> None:
        self._journal.flush()
