"""Memory of one run that its workers share, and that none of them owns: gradients, and a state for those that join.

Owns two anonymous files (memfd) of the process that started the run: they outlive any worker. Each worker has two
gradients, used in turn: while one step's are still read, the next one is written into the other. Called by the
controller, which makes it, and by workers, which open it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.sync.parameter_server.shared_weights import MemoryAddress, SharedWeights

_NAME = "shoal-state"


class RunAddress(NamedTuple):
    """gradients: as of a server with two workers for each; descriptor: of the state's file, in the same process"""

    gradients: MemoryAddress
    descriptor: int


class RunMemory:
    """One process's view."""

    def __init__(self, address: RunAddress, gradients: SharedWeights, *, owns_state: bool = False) -> None:
        self.address, self._gradients, self._owns_state = address, gradients, owns_state

    @classmethod
    def create(cls, num_elements: int, num_workers: int) -> RunMemory:
        gradients = SharedWeights.create(num_elements, 2 * num_workers)
        return cls(RunAddress(gradients.address, os.memfd_create(_NAME)), gradients, owns_state=True)

    @classmethod
    def open(cls, address: RunAddress) -> RunMemory:
        """Raises OSError on another host, or in another container."""
        return cls(address, SharedWeights.open(address.gradients))

    def get_gradient(self, worker: int, version: int) -> Tensor:
        """[elements], float32: the worker's, of the step that follows `version` steps."""
        return self._gradients.gradients[2 * worker + version % 2]

    def write_state(self, state: dict[str, Any]) -> None:
        """Replace the state. No worker may read it meanwhile."""
        with self._state_file.open("r+b") as file:
            file.truncate()
            torch.save(state, file)

    def read_state(self) -> dict[str, Any]:
        """On the CPU: the worker that has written it may have another GPU."""
        with self._state_file.open("rb") as file:
            found: dict[str, Any] = torch.load(file, "cpu", weights_only=True)
            return found

    @property
    def _state_file(self) -> Path:
        return Path(f"/proc/{self.address.gradients.process}/fd/{self.address.descriptor}")

    def close(self) -> None:
        """Idempotent."""
        self._gradients.close()
        if self._owns_state:
            os.close(self.address.descriptor)
            self._owns_state = False
