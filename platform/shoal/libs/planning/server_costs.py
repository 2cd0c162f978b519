"""What a parameter server and its workers take for the weights of a model: measured with the real objects.

Called by `planner`, in one process: the copies into and out of shared memory, and the servers' updates.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.libs.planning.calibration import EVICTED_BYTES
from shoal.sync.parameter_server.clock import Push, Update
from shoal.sync.parameter_server.config import ServersConfig
from shoal.sync.parameter_server.partition import plan_partition
from shoal.sync.parameter_server.server import ParameterServer

NUM_UPDATES = 7


@dataclass(frozen=True)
class ServerCosts:
    """Seconds and bytes; of `sync.servers` servers.

    weight_bytes: of all parameters
    copy_s:       of a worker: all parameters out of the servers' memory, or all gradients into it
    update_s:     of one server: an update with one gradient
    add_s:        of one server: each further gradient of the update
    state_bytes:  of one server: its weights, three times, and what its optimiser stores
    """

    weight_bytes: int
    copy_s: float
    update_s: float
    add_s: float
    state_bytes: int

    def time_update_s(self, num_pushes: int) -> float:
        return self.update_s + (num_pushes - 1) * self.add_s

    def memory_bytes(self, num_workers: int, num_servers: int) -> float:
        """Of one server: with a place for each worker's gradient, and one for their sum."""
        return self.state_bytes + (num_workers + 1) * self.weight_bytes / num_servers


def measure_server_costs(optimizer: Optimizer, spec: ServersConfig) -> ServerCosts:
    """Of the first server of `spec.servers`. `optimizer`: of the Task, over the full model.

    Raises ConfigError for an optimiser or parameters that servers do not take.
    """
    optimizer = spec.make_server_optimizer(optimizer)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    copies = [torch.zeros_like(each, requires_grad=False) for each in parameters]
    partition = plan_partition(optimizer, spec.servers)
    server = ParameterServer(0, optimizer, spec, num_workers=2)
    try:
        server.load({"version": torch.tensor(0), "weights": torch.zeros(partition.get_size(0))})
        vector = server.memory.gradients[0]
        copy_s = _time_s(lambda: partition.read(0, vector, copies)) * spec.servers

        def commit(num_pushes: int) -> None:
            version = server.version
            server.commit(Update(version + 1, [Push(worker, 0, version, version) for worker in range(num_pushes)]))

        update_s, both_s = _time_s(lambda: commit(1)), _time_s(lambda: commit(2))
        state = [each for name, each in server.dump().items() if name not in ("version", "weights")]
        weights_bytes = 4 * partition.get_size(0)
        state_bytes = 3 * weights_bytes + sum(map(_count_bytes, state))
        total = sum(map(_count_bytes, parameters))
        return ServerCosts(total, copy_s, update_s, max(0.0, both_s - update_s), state_bytes)
    finally:
        server.close()


def _time_s(run: Callable[[], object]) -> float:
    """The median of some, after one that may allocate. Other work has the caches in between, as in a run."""
    run()
    others, seconds = torch.zeros(EVICTED_BYTES // 4), []
    for _ in range(NUM_UPDATES):
        others += 1
        began_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def _count_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
