"""The interface of what copies the metrics of a run to files of another program, such as TensorBoard."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np

from shoal.plugins.find import load_reference
from shoal.plugins.library import collect_extensions

GROUP = "shoal.metric_mirrors"  # of entry points, and of the extensions of libraries: classes of `MetricMirror`
LogEntry = tuple[int, float, dict[str, float]]  # step, Unix time in seconds, values


class MetricMirror(ABC):
    """The files of one incarnation of a run. Any thread may call a method; errors of the disk are logged."""

    @abstractmethod
    def __init__(self, run_id: str, folder: Path, incarnation: int) -> None: ...

    @property
    @abstractmethod
    def has_file(self) -> bool:
        """Whether a file exists, and so begins with a known step."""

    @abstractmethod
    def enqueue(self, logged: list[LogEntry]) -> None:
        """Queue committed entries for writing."""

    @abstractmethod
    def forget_after(self, step: int) -> None:
        """Drop queued entries of later, abandoned steps, and make readers drop the written ones."""

    @abstractmethod
    def write(self) -> None:
        """Write the queued entries. Called by the recorder's thread."""

    @abstractmethod
    def add_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        """A distribution: counts [bins] between edges [bins + 1]."""

    @abstractmethod
    def close(self) -> None:
        """Write the rest, and close the file."""


def open_mirrors(run_id: str, folder: Path, incarnation: int) -> list[MetricMirror]:
    """Those of all libraries."""
    return [load_reference(each)(run_id, folder, incarnation) for each in collect_extensions(GROUP).values()]
