"""Send objects between processes through memory that both map: arrays and tensors are never copied twice.

    one object   one anonymous file (memfd): [sizes] [pickle] [buffer] [buffer] ...
    one message  one byte over a socket, with that file's descriptor attached

The file has no name, so it disappears when the processes die, and /dev/shm's limit does not apply. Its descriptor is
closed after mapping: many retained batches use memory, but no descriptors. An array that is already mapped from a file
(`numpy.memmap`) is mapped from there again, whatever its size. Called by the pool and by the worker processes.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 64
_ARRIVED = b"\x01"


class _Pickler(pickle.Pickler):
    """Keeps arrays and plain CPU tensors out of the pickle, and collects the modules that the reader needs."""

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self.modules: set[str] = set()

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and value.device.type == "cpu" and value.layout is torch.strided and value.numel():
            special = (value.is_nested, value.requires_grad, value.is_quantized, value.is_conj(), value.is_neg())
            if not any(special):
                flat = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
                return _rebuild_tensor, (pickle.PickleBuffer(flat.data), value.dtype, tuple(value.shape))
        if type(value) is np.memmap and (arguments := _get_memmap_arguments(value)) is not None:
            return np.memmap, arguments
        if isinstance(value, type | FunctionType) and value.__module__:
            self.modules.add(value.__module__)
        return NotImplemented


def _rebuild_tensor(memory: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)


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


def pack(value: Any) -> tuple[int, set[str]]:
    """A descriptor of a file with `value`, and the modules of its classes and functions.

    Raises as pickle does.
    """
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    pickler = _Pickler(file, buffers)
    pickler.dump(value)
    parts = [file.getbuffer(), *(buffer.raw() for buffer in buffers)]
    sizes = struct.pack(f"<{1 + len(parts)}Q", len(parts), *(part.nbytes for part in parts))
    descriptor = os.memfd_create("shoal-data")
    try:
        _write(descriptor, memoryview(sizes), 0)
        for part, offset in zip(parts, _offsets([part.nbytes for part in parts]), strict=True):
            _write(descriptor, part, offset)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, pickler.modules


def unpack(descriptor: int, private: bool = False) -> Any:
    """The object in the file; its arrays and tensors are views of the mapped file, unmapped with the last of them.

    private: several processes read this file: writes of one are invisible to the others
    """
    size_bytes = os.fstat(descriptor).st_size
    # not Python's mmap, which keeps its own descriptor while mapped
    name = f"/proc/self/fd/{descriptor}"
    mapped = torch.from_file(name, shared=not private, size=size_bytes, dtype=torch.uint8)
    memory = mapped.numpy().data
    (count,) = struct.unpack_from("<Q", memory)
    sizes = struct.unpack_from(f"<{count}Q", memory, 8)
    header, *buffers = (memory[at : at + size] for size, at in zip(sizes, _offsets(sizes), strict=True))
    return pickle.loads(header, buffers=buffers)


def _offsets(sizes: Sequence[int]) -> list[int]:
    offsets, at = [], 8 * (1 + len(sizes))
    for size in sizes:
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        offsets.append(at)
        at += size
    return offsets


def _write(descriptor: int, part: memoryview, offset: int) -> None:
    while part.nbytes:
        written = os.pwrite(descriptor, part, offset)
        part, offset = part[written:], offset + written


def send(connection: socket.socket, value: Any) -> None:
    """Send `value`. Raises as pickle does, and OSError when the reader is gone."""
    descriptor, _ = pack(value)
    try:
        send_packed(connection, descriptor)
    finally:
        os.close(descriptor)


def send_packed(connection: socket.socket, descriptor: int) -> None:
    """Send the result of `pack`; the descriptor stays the caller's."""
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
        return unpack(descriptors[0], private)
    finally:
        os.close(descriptors[0])
