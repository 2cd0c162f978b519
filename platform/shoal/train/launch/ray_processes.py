"""Processes of a run that are Ray workers: each runs one function to its end.

Called by `flows.training` for asynchronous training. Its processes share memory and sockets of this node, or are on any
nodes of the cluster, as Ray places them. Where they share a node that is not the driver's, a worker there starts them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shoal.cluster.capacity import make_host_options
from shoal.errors import summarize_error
from shoal.runs.ray_event_channel import CALL_TIMEOUT_S, RayLog
from shoal.train.launch.ray_task import change_to_task_folder, to_shoal_error
from shoal.train.reporting.result import TrainResult

if TYPE_CHECKING:
    from shoal.train.launch.ray_train import WorkerSetup


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
        is_worker = name.startswith("worker")
        reserved = {"num_cpus": int(is_worker and not has_gpu), "num_gpus": int(is_worker and has_gpu)}
        task = ray.remote(**reserved, max_retries=0, max_calls=1, name=name)(_run_in)
        where: dict[str, Any] = {"scheduling_strategy": "SPREAD"}
        if not is_anywhere:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            where = {"scheduling_strategy": here}
        elif not is_worker:  # a head with 0 CPUs is no place for one
            where = make_host_options(number=int(name.split()[1]))
        self._reference = task.options(**where).remote(Path.cwd(), target, arguments)
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


def fit_on_host(node: str, setting: WorkerSetup, mailbox: ActorHandle) -> TrainResult:
    """`fit_replicas` in a worker on a node that has the CPUs or GPUs for it. Raises RayError when that fails."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0, max_calls=1, scheduling_strategy=there)(_fit_here)
    result: TrainResult = ray.get(task.remote(setting, mailbox))
    return result


def _fit_here(setting: WorkerSetup, mailbox: ActorHandle) -> TrainResult:
    from shoal.train.launch.parameter_server import fit_replicas

    spec, posted = setting.spec, RayLog(mailbox)
    change_to_task_folder(spec, setting.working_folder)
    start = partial(RayProcess, has_gpu=spec.device == "cuda")
    try:
        return fit_replicas(spec, setting.run_id, setting.folder, posted, posted.stop_requested.is_set, start)
    except (Exception, SystemExit) as error:
        ray.get(mailbox.report_failure.remote(to_shoal_error(error)), timeout=CALL_TIMEOUT_S)
        raise
    finally:
        posted.close()


def _run_in(folder: Path, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    if folder.is_dir():  # else this is another node, where Ray has chosen the folder with the job's files
        os.chdir(folder)
    target(*arguments)
