"""Memory that a server shares with the workers of its host: two buffers of weights, and a gradient for each worker.

    one server   one anonymous file (memfd), mapped by all: [header][weights][weights][gradient of worker 0] ...

The server writes new weights into the buffer that is not the newest, and then makes it the newest. A reader asks the
server for the versions, copies, and then compares the header: a buffer that was overwritten meanwhile has another
version there, since the server changes the header first. So no reader keeps weights of two versions. The messages
between server and worker order the accesses to the memory.
"""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

_HEADER_BYTES, _ALIGNMENT = 64, 64
_NAME = "shoal-weights"
WRITING = -1  # in place of a version


class MemoryAddress(NamedTuple):
    """Where the memory is: a descriptor of a process of a host, and its division.

    boot: the id of the host's system since it runs
    mark: a random number in the memory's header, since another container's process may have the same number
    """

    boot: str
    process: int
    descriptor: int
    mark: int
    num_elements: int
    num_workers: int


class SharedWeights:
    """One process's mapping. Elements are float32."""

    def __init__(self, address: MemoryAddress, memory: mmap.mmap, *, owns_descriptor: bool = False) -> None:
        self.address, self._owns_descriptor = address, owns_descriptor
        size, n = address.num_elements, address.num_workers
        stride = _aligned(4 * size)
        everything = torch.frombuffer(memory, dtype=torch.uint8)

        def vector(index: int) -> Tensor:
            first = _HEADER_BYTES + index * stride
            return everything[first : first + 4 * size].view(torch.float32)

        header = everything[:_HEADER_BYTES].view(torch.int64)
        self._versions, self._mark = header[:2], header[2:3]  # the versions of both buffers
        self._buffers = [vector(0), vector(1)]
        self.gradients = [vector(2 + worker) for worker in range(n)]

    @classmethod
    def create(cls, num_elements: int, num_workers: int) -> SharedWeights:
        """The server's: the descriptor stays open, so that workers can open it by this process's number."""
        descriptor = os.memfd_create(_NAME)
        mark = secrets.randbits(62)
        address = MemoryAddress(_get_boot_id(), os.getpid(), descriptor, mark, num_elements, num_workers)
        os.truncate(descriptor, _size_bytes(address))
        made = cls(address, mmap.mmap(descriptor, _size_bytes(address)), owns_descriptor=True)
        made._versions.fill_(WRITING)
        made._mark.fill_(mark)
        return made

    @classmethod
    def open(cls, address: MemoryAddress) -> SharedWeights:
        """A worker's. Raises OSError when the server is gone, or on another host or in another container."""
        place = f"/proc/{address.process}/fd/{address.descriptor}"
        if address.boot != _get_boot_id() or not os.readlink(place).startswith(f"/memfd:{_NAME}"):
            raise FileNotFoundError(place)
        descriptor = os.open(place, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != _size_bytes(address):
                raise FileNotFoundError(place)
            found = cls(address, mmap.mmap(descriptor, _size_bytes(address)))
        finally:
            os.close(descriptor)
        if int(found._mark) != address.mark:
            raise FileNotFoundError(place)
        return found

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
        self._versions = self._mark = torch.empty(0, dtype=torch.int64)
        if self._owns_descriptor:
            os.close(self.address.descriptor)
            self._owns_descriptor = False


def _get_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _size_bytes(address: MemoryAddress) -> int:
    return _HEADER_BYTES + (2 + address.num_workers) * _aligned(4 * address.num_elements)
