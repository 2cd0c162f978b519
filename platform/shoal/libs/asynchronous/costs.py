"""What a parameter server and its workers take for the weights of a model: measured with the real objects.

Called by `shoal plan`, which finds it by `SyncConfig.probe`: the copies into and out of shared memory and the servers'
updates in one process, and exchanges between several.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.extend.sync import EVICTED_BYTES, Connection, CostProbe, ServerCosts, SyncConfig
from shoal.extend.train import list_parameters
from shoal.libs.asynchronous.clock import Clock, Push, Update
from shoal.libs.asynchronous.config import ParameterServerConfig, ServersConfig
from shoal.libs.asynchronous.controller import ControllerSetting
from shoal.libs.asynchronous.parameter_server.controller import ServerController
from shoal.libs.asynchronous.parameter_server.partition import plan_partition
from shoal.libs.asynchronous.parameter_server.server import ParameterServer
from shoal.libs.asynchronous.parameter_server.server_service import ServerService
from shoal.libs.asynchronous.parameter_server.worker import ParameterServerSync

NUM_UPDATES = 7
TIMEOUT_S = 120.0
ONE_SERVER = ParameterServerConfig()


class ServerProbe(CostProbe):
    """Of all kinds with servers."""

    def measure(self, optimizer: Optimizer, config: SyncConfig) -> ServerCosts:
        spec = cast(ServersConfig, config)
        optimizer = spec.make_server_optimizer(optimizer)
        parameters = list_parameters(optimizer)
        copies = [torch.zeros_like(each, requires_grad=False) for each in parameters]
        partition = plan_partition(optimizer, spec.servers)
        with closing(ParameterServer(0, optimizer, spec, num_workers=2)) as server:
            server.load({"version": torch.tensor(0), "weights": torch.zeros(partition.get_size(0))})
            vector = server.memory.gradients[0]
            copy_s = _time_s(lambda: partition.read(0, vector, copies)) * spec.servers

            def commit(num_pushes: int) -> None:
                version = server.version
                server.commit(Update(version + 1, [Push(worker, 0, version, version) for worker in range(num_pushes)]))

            update_s, both_s = _time_s(lambda: commit(1)), _time_s(lambda: commit(2))
            state = [each for name, each in server.dump().items() if name not in ("version", "weights")]
            state_bytes = 3 * 4 * partition.get_size(0) + _count_bytes(state)
            return ServerCosts(_count_bytes(parameters), copy_s, update_s, max(0.0, both_s - update_s), state_bytes)

    @contextmanager
    def open_controller(self, folder: str, num_workers: int) -> Iterator[ServerController]:
        controller, server = _list_addresses(folder)
        run = ControllerSetting(controller, [server], num_workers, None, TIMEOUT_S)
        with closing(ServerController(run, Clock(num_workers), ONE_SERVER)) as opened:
            opened.start()
            yield opened

    @contextmanager
    def open_server(self, folder: str, num_workers: int, optimizer: Optimizer) -> Iterator[ServerService]:
        controller, server = _list_addresses(folder)
        applied = ParameterServer(0, optimizer, ONE_SERVER, num_workers)
        with closing(ServerService(server, applied, controller, TIMEOUT_S)) as opened:
            opened.start()
            yield opened

    def open_worker(self, folder: str, worker: int, optimizer: Optimizer) -> ParameterServerSync:
        controller, server = _list_addresses(folder)
        return ParameterServerSync(optimizer, ONE_SERVER, Connection(worker, 0, controller, [server], TIMEOUT_S))


def _list_addresses(folder: str) -> tuple[str, str]:
    return f"ipc://{folder}/controller", f"ipc://{folder}/server"


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


def _count_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)
