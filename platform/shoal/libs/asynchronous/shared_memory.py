"""Memory that processes of one host share: of a server with its workers, and of the workers of an elastic run.

    one server   one anonymous file (memfd), mapped by all: [header][weights][weights][gradient of worker 0] ...

The server writes new weights into the buffer that is not the newest, and then makes it the newest. A reader asks the
server for the versions, copies, and then compares the header: a buffer that was overwritten meanwhile has another
version there, since the server changes the header first. So no reader keeps weights of two versions. The messages
between server and worker order the accesses to the memory.
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
from shoal.extend.sync import MemoryAddress, create_memory, map_memory

_HEADER_BYTES, _ALIGNMENT = 64, 64
MAX_MESSAGE_BYTES = 2**32 - 1  # of msgpack, for what a message carries
WRITING = -1  # in place of a version


class WeightsAddress(NamedTuple):
    """Where the memory is, and its division."""

    memory: MemoryAddress
    num_elements: int
    num_workers: int


class SharedWeights:
    """One process's mapping. Elements are float32."""

    def __init__(self, address: WeightsAddress, *, owns_descriptor: bool = False) -> None:
        """Raises OSError when the server is gone, or on another host or in another container."""
        memory = map_memory(address.memory, is_writable=True)
        if memory is None:
            raise FileNotFoundError(f"the memory of process {address.memory.pid} is gone, or of another host")
        self.address, self._owns_descriptor = address, owns_descriptor
        stride = _aligned(4 * address.num_elements)
        everything = torch.frombuffer(memory, dtype=torch.uint8)

        def vector(index: int) -> Tensor:
            first = _HEADER_BYTES + index * stride
            return everything[first : first + 4 * address.num_elements].view(torch.float32)

        self._versions = everything[:16].view(torch.int64)  # of both buffers
        self._buffers = [vector(0), vector(1)]
        self.gradients = [vector(2 + worker) for worker in range(address.num_workers)]

    @classmethod
    def create(cls, num_elements: int, num_workers: int) -> SharedWeights:
        """The server's: the descriptor stays open, so that workers can open it by this process's number."""
        memory = create_memory("shoal-weights", _HEADER_BYTES + (2 + num_workers) * _aligned(4 * num_elements))
        created = cls(WeightsAddress(memory, num_elements, num_workers), owns_descriptor=True)
        created._versions.fill_(WRITING)
        return created

    def publish(self, weights: Tensor, version: int) -> int:
        """Make `weights` the newest ones; returns their buffer. Called by the server alone."""
        buffer = 1 - self.newest_buffer
        self._versions[buffer] = WRITING
        self._buffers[buffer].copy_(weights)
        self._versions[buffer] = version
        return buffer

    @property
    def newest_buffer(self) -> int:
        return int(self._versions[1] > self._versions[0])

    def get_versions(self) -> tuple[int, int]:
        """The versions of both buffers; WRITING: none yet, or being written."""
        first, second = self._versions.tolist()
        return first, second

    def find_buffer(self, version: int) -> Tensor | None:
        """The weights of this version, if a buffer has them."""
        versions = self.get_versions()
        return self._buffers[versions.index(version)] if version in versions else None

    def close(self) -> None:
        """Release the mapping. Idempotent."""
        self._buffers, self.gradients = [], []
        self._versions = torch.empty(0, dtype=torch.int64)
        if self._owns_descriptor:
            os.close(self.address.memory.fd)
            self._owns_descriptor = False


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class RunAddress(NamedTuple):
    """gradients: as of a server with two workers for each"""

    gradients: WeightsAddress
    state: MemoryAddress


class RunMemory:
    """One process's view of the memory that the workers of an elastic run share, and that none of them owns.

    Two anonymous files of the process that started the run, which outlive any worker: gradients, and a state for those
    that join. Each worker has two gradients, used in turn: while one step's are still read, the next one is written
    into the other. The controller makes it, and uses it for workers of other hosts; workers of its host open it.
    """

    def __init__(self, address: RunAddress, gradients: SharedWeights, *, owns_state: bool = False) -> None:
        self.address = address
        self._gradients = gradients
        self._owns_state = owns_state

    @classmethod
    def create(cls, num_elements: int, num_workers: int) -> RunMemory:
        gradients = SharedWeights.create(num_elements, 2 * num_workers)
        return cls(RunAddress(gradients.address, create_memory("shoal-state", 0)), gradients, owns_state=True)

    @classmethod
    def open(cls, address: RunAddress) -> RunMemory:
        """Raises OSError on another host, or in another container."""
        return cls(address, SharedWeights(address.gradients))

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
        return self.address.state.path

    def close(self) -> None:
        """Idempotent."""
        self._gradients.close()
        if self._owns_state:
            os.close(self.address.state.fd)
            self._owns_state = False


def encode_state(state: dict[str, Any]) -> bytes:
    """For a message. Raises ConfigError when none is so long."""
    torch.save(state, file := BytesIO())
    return require_message(file.getvalue())


def decode_state(encoded: bytes) -> dict[str, Any]:
    return _load_state(BytesIO(encoded))


def _load_state(file: IO[bytes]) -> dict[str, Any]:
    """On the CPU: the worker that has written it may have another GPU."""
    state: dict[str, Any] = torch.load(file, "cpu", weights_only=True)
    return state


def require_message(content: bytes) -> bytes:
    """The content. Raises ConfigError when it is longer than a message between two hosts may be."""
    if len(content) > MAX_MESSAGE_BYTES:
        problem = f"what a worker gives to those of other hosts has {len(content):,} bytes, and a message 4 GiB at most"
        remedy = "use sync.kind=parameter_server with sync.servers=N, which divides it, or workers=N with parallel=fsdp"
        raise ConfigError("workers", "[min,max]", problem, remedy)
    return content
