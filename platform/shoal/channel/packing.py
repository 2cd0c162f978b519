"""Objects as bytes for another process of ours, in which arrays and tensors lie as in memory.

    [bytes of it all] [number of parts] [bytes of each part]   [pickle] [buffer] [buffer] ...   each part aligned

They are copied by what carries them alone: a socket (`connection`), or memory that is handed over. The reader knows who
has written them, since a pickle runs what it names.
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
SIZE = struct.Struct("<Q")


class Packer(pickle.Pickler):
    """Packs one object."""

    def __init__(self) -> None:
        self._file, self._buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        super().__init__(self._file, protocol=5, buffer_callback=self._buffers.append)

    def pack(self, value: Any) -> list[bytes | memoryview]:
        """The bytes, in chunks, of which none is empty. Raises as pickle does."""
        self.dump(value)
        parts = [self._file.getbuffer(), *(buffer.raw() for buffer in self._buffers)]
        chunks, end = list[bytes | memoryview](), SIZE.size * (2 + len(parts))
        for part in parts:
            padding = bytes(-end % ALIGNMENT)
            chunks += [each for each in (padding, part) if each]
            end += len(padding) + part.nbytes
        return [struct.pack(f"<{2 + len(parts)}Q", end, len(parts), *(part.nbytes for part in parts)), *chunks]

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and value.device.type == "cpu" and value.layout is torch.strided and value.numel():
            special = (value.is_nested, value.requires_grad, value.is_quantized, value.is_conj(), value.is_neg())
            if not any(special):
                flat = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
                return _rebuild_tensor, (pickle.PickleBuffer(flat.data), value.dtype, tuple(value.shape))
        return NotImplemented


def _rebuild_tensor(memory: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)


def unpack(memory: memoryview) -> Any:
    """The object; its arrays and tensors are views of the memory."""
    _, count = struct.unpack_from("<2Q", memory)
    parts, end = list[memoryview](), SIZE.size * (2 + count)
    for size in struct.unpack_from(f"<{count}Q", memory, 2 * SIZE.size):
        begin = end + -end % ALIGNMENT
        end = begin + size
        parts.append(memory[begin:end])
    pickled, *buffers = parts
    return pickle.loads(pickled, buffers=buffers)
