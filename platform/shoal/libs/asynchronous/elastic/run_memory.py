"""Memory of one run that its workers share, and that none of them owns: gradients, and a state for those that join.

Owns two anonymous files (memfd) of the process that started the run: they outlive any worker. Each worker has two
gradients, used in turn: while one step's are still read, the next one is written into the other. Called by the
controller, which makes it and uses it for workers of other hosts, and by workers of its host, which open it.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.libs.asynchronous.parameter_server.shared_weights import MemoryAddress, SharedWeights

_NAME = "shoal-state"
MAX_MESSAGE_BYTES = 2**32 - 1  # of msgpack, for what a message carries


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

    def add_up(self, workers: Collection[int], version: int) -> Tensor:
        """[elements], float32: the sum of their gradients, in this order, of the step that follows `version` steps."""
        total = torch.zeros_like(self.get_gradient(0, version))
        for worker in workers:
            total += self.get_gradient(worker, version)
        return total

    def write_state(self, state: dict[str, Any]) -> None:
        """Replace the state. No worker may read it meanwhile."""
        with self.state_file.open("wb") as file:
            torch.save(state, file)

    def read_state(self) -> dict[str, Any]:
        with self.state_file.open("rb") as file:
            return _load_state(file)

    @property
    def state_file(self) -> Path:
        """What `encode_state` returns, once a state is written."""
        return Path(f"/proc/{self.address.gradients.process}/fd/{self.address.descriptor}")

    def close(self) -> None:
        """Idempotent."""
        self._gradients.close()
        if self._owns_state:
            os.close(self.address.descriptor)
            self._owns_state = False


def encode_state(state: dict[str, Any]) -> bytes:
    """For a message. Raises ConfigError when none is so long."""
    torch.save(state, file := BytesIO())
    return require_message(file.getvalue())


def decode_state(encoded: bytes) -> dict[str, Any]:
    return _load_state(BytesIO(encoded))


def _load_state(file: IO[bytes]) -> dict[str, Any]:
    """On the CPU: the worker that has written it may have another GPU."""
    found: dict[str, Any] = torch.load(file, "cpu", weights_only=True)
    return found


def require_message(content: bytes) -> bytes:
    """The content. Raises ConfigError when it is longer than a message between two hosts may be."""
    if len(content) > MAX_MESSAGE_BYTES:
        problem = f"what a worker gives to those of other hosts has {len(content):,} bytes, and a message 4 GiB at most"
        remedy = "use sync.kind=parameter_server with sync.servers=N, which divides it, or workers=N with parallel=fsdp"
        raise ConfigError("workers", "[min,max]", problem, remedy)
    return content
