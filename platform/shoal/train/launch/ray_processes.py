"""Processes of a run that are Ray workers: each runs one function to its end.

Called by `flows.training` for asynchronous training. Its processes share memory and sockets of this node, or are on any
nodes of the cluster, as Ray places them.
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
    """One Ray worker, as a ProcessHandle of `parameter_server`. Workers reserve a CPU each, servers nothing.

    is_anywhere: on any node; otherwise on this one
    has_gpu:     workers reserve a GPU in place of the CPU, as those of Ray Train do, and see no other
    """

    def __init__(
        self,
        name: str,
        target: Callable[..., None],
        arguments: tuple[Any, ...],
        *,
        is_anywhere: bool = False,
        has_gpu: bool = False,
    ) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        is_worker = name.startswith("worker")
        reserved = {"num_cpus": int(is_worker and not has_gpu), "num_gpus": int(is_worker and has_gpu)}
        task = ray.remote(**reserved, max_retries=0, max_calls=1, name=name)(_run_in)
        where = "SPREAD" if is_anywhere else here
        self._reference = task.options(scheduling_strategy=where).remote(Path.cwd(), target, arguments)
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


def find_host_address() -> str:
    """The address of this node for processes on others; "" when the cluster has one node."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return str(ray.util.get_node_ip_address()) if len(nodes) > 1 else ""


def _run_in(folder: Path, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    if folder.is_dir():  # else this is another node, where Ray has chosen the folder with the job's files
        os.chdir(folder)
    target(*arguments)
