"""The interface of what copies the metrics of a run to files of another program, such as TensorBoard."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from shoal.plugins.find import load_sound_extensions

_log = logging.getLogger(__name__)

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


class MetricMirrors:
    """Those of all libraries, of one incarnation of a run. One that fails is left out: the run is recorded without."""

    def __init__(self, run_id: str, folder: Path, incarnation: int) -> None:
        self._run_id, self._mirrors = run_id, list[MetricMirror]()
        for name, make in load_sound_extensions(GROUP).items():
            try:
                self._mirrors.append(make(run_id, folder, incarnation))
            except Exception as error:  # noqa: BLE001 - whatever a package raises
                self._warn(name, error)

    def __iter__(self) -> Iterator[MetricMirror]:
        return iter(self._mirrors)

    def call_each(self, act: Callable[[MetricMirror], None]) -> None:
        for mirror in self._mirrors:
            try:
                act(mirror)
            except Exception as error:  # noqa: BLE001 - whatever a package raises
                self._mirrors = [each for each in self._mirrors if each is not mirror]
                self._warn(type(mirror).__name__, error)

    def _warn(self, name: str, error: Exception) -> None:
        problem = f"{type(error).__name__}: {error}"
        _log.warning("run %s: its metrics are not copied by %s: %s", self._run_id, name, problem)
