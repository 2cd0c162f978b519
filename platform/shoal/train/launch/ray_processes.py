"""Processes of a run that are Ray workers on this node: each runs one function to its end.

Called by `flows.training` for asynchronous training, whose processes share memory and sockets of one host.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shoal.errors import summarize_error


class RayProcess:
    """One Ray worker, as a ProcessHandle of `parameter_server`. Workers take a CPU each, servers none."""

    def __init__(self, name: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        num_cpus = 1 if name.startswith("worker") else 0
        task = ray.remote(num_cpus=num_cpus, max_retries=0, max_calls=1, name=name)(_run_in)
        self._reference = task.options(scheduling_strategy=here).remote(Path.cwd(), target, arguments)
        self._cause: str | None = None

    def poll(self) -> str | None:
        if self._cause is None and ray.wait([self._reference], timeout=0)[0]:
            try:
                ray.get(self._reference)
                self._cause = ""
            except RayError as error:
                self._cause = summarize_error(error, line=-1)
        return self._cause

    def end(self) -> None:
        if self.poll() is None:
            ray.cancel(self._reference, force=True)


def _run_in(folder: Path, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.chdir(folder)
    target(*arguments)
