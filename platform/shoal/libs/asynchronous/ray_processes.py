"""Processes of a run that are Ray workers: each runs one function to its end.

Called by `flows.training` for asynchronous and elastic training. Reserves what the processes use, and starts each on
the host that `replica_placement` chooses.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shoal.errors import ConnectionLost, TrainError, summarize_error
from shoal.extend.train import TrainSpec
from shoal.libs.asynchronous.process_group import Host, ReplicaPlacement
from shoal.network_address import is_loopback


class _Worker:
    """An actor, since Ray fails the calls of one when its host is lost: it notices that of a task minutes later."""

    def run(self, folder: Path, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if folder.is_dir():  # else this is another node, where Ray has chosen the folder with the job's files
            os.chdir(folder)
        target(*arguments)


class RayProcess:
    """One Ray worker, as a ProcessHandle of `parameter_server`. Workers reserve a CPU each, servers nothing.

    host:     the id of the node on which it begins; "": any
    is_fixed: on no other one; else a worker is on another when that is lost or occupied
    has_gpu:  workers reserve a GPU in place of the CPU, as those of Ray Train do, and see no other
    """

    def __init__(
        self,
        name: str,
        target: Callable[..., None],
        arguments: tuple[Any, ...],
        *,
        host: str = "",
        is_fixed: bool = False,
        has_gpu: bool = False,
    ) -> None:
        self._name, is_worker = name, name.startswith("worker")
        is_free = is_worker and not is_fixed  # an actor that reserves nothing is on any host, unless it must be on one
        there = NodeAffinitySchedulingStrategy(host, is_free, is_free) if host else "SPREAD"
        reserved = {"num_cpus": int(is_worker and not has_gpu), "num_gpus": int(is_worker and has_gpu)}
        self._worker: Any = ray.remote(**reserved, scheduling_strategy=there)(_Worker).remote()
        self._reference = self._worker.run.options(name=name).remote(Path.cwd(), target, arguments)
        self._cause: str | None = None

    def poll(self) -> str | None:
        """Raises TrainError for an error that would recur in another process."""
        if self._cause is None and ray.wait([self._reference], timeout=0)[0]:
            failure: RayError | None = None
            try:
                ray.get(self._reference)
                self._cause = ""
            except RayError as error:
                failure, self._cause = error, summarize_error(error, line=-1)
            ray.kill(self._worker)  # what it has reserved is free
            if isinstance(failure, RayTaskError) and not isinstance(failure.cause, ConnectionLost):
                raise TrainError(f"{self._name} cannot start: {self._cause}")
        return self._cause

    def end(self) -> None:
        if self._cause is None:  # without `poll`, which raises: others are to be ended after this one
            ray.kill(self._worker)


class RayProcesses:
    """Starts the processes of one run."""

    def __init__(self, spec: TrainSpec) -> None:
        self._is_shared = spec.applied_sync.shares_memory
        self._has_gpu = spec.device == "cuda"
        self._home = str(ray.get_runtime_context().get_node_id())
        self._placement = ReplicaPlacement(self._home, spec.workers if self._is_shared else 0)

    def start(self, name: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> RayProcess:
        """Begin a process. Its name says what it reserves."""
        host = self._placement.choose(name, self._list_hosts())
        return RayProcess(name, target, arguments, host=host, is_fixed=self._is_shared, has_gpu=self._has_gpu)

    def find_address(self) -> str:
        """The address of this host for processes on others; "" where all of them, also later ones, are on this one."""
        address, hosts = str(ray.util.get_node_ip_address()), self._list_hosts()
        if self._is_shared:
            return "" if self._placement.find_anchor(hosts) == self._home else address
        return "" if len(hosts) == 1 and is_loopback(address) else address

    def _list_hosts(self) -> list[Host]:
        resource = "GPU" if self._has_gpu else "CPU"
        return [Host(node["NodeID"], int(node["Resources"].get(resource, 0))) for node in ray.nodes() if node["Alive"]]
