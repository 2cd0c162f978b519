"""What `shoal plan` asks of a kind whose weights are on servers: seconds and bytes of its exchanges.

Owns the interface, which a kind's `SyncConfig.probe` names; an implementation measures with the objects of a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.plugins.find import load_reference
from shoal.sync.config import SyncConfig

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from shoal.sync.synchronizer import Synchronizer

EVICTED_BYTES = 64 << 20  # more than caches hold: to be touched between two measurements


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


class CostProbe(ABC):
    """A kind's exchanges, in one process, and among `num_workers` processes with one server.

    folder: of the sockets, the same in all of these processes
    """

    @abstractmethod
    def measure(self, optimizer: Optimizer, config: SyncConfig) -> ServerCosts:
        """Of the first server of `config`. `optimizer`: of the Task, over the full model.

        Raises ConfigError for an optimiser or parameters that servers do not take.
        """

    @abstractmethod
    def open_controller(self, folder: str, num_workers: int) -> AbstractContextManager[object]:
        """The controller, which answers from now on."""

    @abstractmethod
    def open_server(self, folder: str, num_workers: int, optimizer: Optimizer) -> AbstractContextManager[object]:
        """The server, with its optimiser over the full model. It answers from now on."""

    @abstractmethod
    def open_worker(self, folder: str, worker: int, optimizer: Optimizer) -> Synchronizer:
        """The synchronizer of a worker. The caller closes it."""


def load_probe(config: SyncConfig) -> CostProbe:
    """The probe of a kind with servers. Raises ValueError when it cannot be imported."""
    probe: CostProbe = load_reference(config.probe)()
    return probe
