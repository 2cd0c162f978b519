"""Send objects between processes through memory that both map: arrays and tensors are never copied twice.

    one object   one anonymous file (memfd), as a `Packer` packs it
    one message  one byte over a socket, with that file's descriptor attached

The file has no name, so it disappears when the processes die, and /dev/shm's limit does not apply. Its descriptor is
closed after mapping: many retained batches use memory, but no descriptors. An array that is already mapped from a file
(`numpy.memmap`) is mapped from there again, whatever its size. Called by the pool and by the worker processes.
"""

from __future__ import annotations

import mmap
import os
import socket
from types import FunctionType
from typing import Any

import numpy as np
import torch

from shoal.channel.packing import Packer, unpack

_ARRIVED = b"\x01"


class _MappedPacker(Packer):
    """Has arrays of files mapped again, and collects the modules that the reader needs."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: set[str] = set()

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.memmap and (arguments := _get_memmap_arguments(value)) is not None:
            return np.memmap, arguments
        if isinstance(value, type | FunctionType) and value.__module__:
            self.modules.add(value.__module__)
        return super().reducer_override(value)


def _get_memmap_arguments(value: np.memmap[Any, Any]) -> tuple[object, ...] | None:
    """How to map it again from its file; None for an array in memory, or one with gaps.

    Writes to the new mapping are private to the reader, as for everything else with many readers.
    """
    full: Any = value
    while isinstance(full.base, np.memmap):
        full = full.base
    is_mapped = isinstance(full.base, mmap.mmap) and value.mode in ("r", "r+") and value.size > 0
    if not is_mapped or value.filename is None or not os.path.exists(value.filename):
        return None
    if not (value.flags.c_contiguous or value.flags.f_contiguous):
        return None
    offset = full.offset + value.ctypes.data - full.ctypes.data
    return value.filename, value.dtype, "c", offset, value.shape, "C" if value.flags.c_contiguous else "F"


def write_file(value: Any) -> tuple[int, set[str]]:
    """A descriptor of a file with `value`, and the modules of its classes and functions.

    Raises as pickle does.
    """
    packer = _MappedPacker()
    chunks = packer.pack(value)
    descriptor = os.memfd_create("shoal-data")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.writelines(chunks)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, packer.modules


def map_file(descriptor: int, private: bool = False) -> Any:
    """The object in the file; its arrays and tensors are views of the mapped file, unmapped with the last of them.

    private: several processes read this file: writes of one are invisible to the others
    """
    size_bytes = os.fstat(descriptor).st_size
    # not Python's mmap, which keeps its own descriptor while mapped
    name = f"/proc/self/fd/{descriptor}"
    mapped = torch.from_file(name, shared=not private, size=size_bytes, dtype=torch.uint8)
    return unpack(mapped.numpy().data)


def send(connection: socket.socket, value: Any) -> None:
    """Send `value`. Raises as pickle does, and OSError when the reader is gone."""
    descriptor, _ = write_file(value)
    try:
        send_file(connection, descriptor)
    finally:
        os.close(descriptor)


def send_file(connection: socket.socket, descriptor: int) -> None:
    """Send the result of `write_file`; the descriptor stays the caller's."""
    socket.send_fds(connection, [_ARRIVED], [descriptor])


def receive(connection: socket.socket, private: bool = False) -> Any:
    """Receive the next object. Raises EOFError when the other process is gone, TimeoutError when none comes in time."""
    try:
        arrived, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError as error:
        raise EOFError from error
    if not arrived:
        raise EOFError
    try:
        return map_file(descriptors[0], private)
    finally:
        os.close(descriptors[0])
