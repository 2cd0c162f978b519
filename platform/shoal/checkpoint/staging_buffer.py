"""The copy of the state for writing in the background: one buffer, allocated once and used for every save.

Its bytes are those of the shard file, in the file's order. On CUDA the copies are queued on the current stream, so that
later kernels of that stream wait for them and the host does not; the buffer is then pinned.

A save that is waited for needs no copy: `DirectStaging`.

Called by `checkpointer`, for one save at a time: `begin` and `wait_until_copied` by the training thread, `finish` and
then `pieces` by the background thread.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor

from shoal.checkpoint.directory import BLOCK_BYTES
from shoal.checkpoint.shard_plan import ShardLayout


class StagingBuffer:
    """The buffer for one layout. Its size is that of this rank's shard."""

    _buffer: torch.Tensor

    def __init__(self, layout: ShardLayout, pinned: bool, old: StagingBuffer | None = None) -> None:
        self.layout = layout
        buffer = None if old is None else old._buffer
        if buffer is None or buffer.numel() < layout.size_bytes or buffer.is_pinned() != pinned:
            # Zeros, written now: the first touch of fresh pages takes as long as ten copies.
            buffer = torch.empty(layout.size_bytes, dtype=torch.uint8, pin_memory=pinned).zero_()
        self._buffer = buffer
        self._targets = [
            self._buffer[chunk.begin : chunk.end].view(chunk.dtype).view(chunk.sizes) for chunk in layout.chunks
        ]
        self._rest: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._is_copied = threading.Event()
        self._fetched: torch.cuda.Event | None = None

    @torch.no_grad()
    def start_copy(self, tensors: Mapping[str, torch.Tensor], later: Collection[str] = ()) -> None:
        """Copy this rank's part of the state, except the top-level names `later`, which `finish` copies.

        When it returns, the copied part may change (in stream order, on CUDA, where `later` is not used). On the host
        torch's own threads copy, as many as this rank has (measured, docs/decisions/006).
        """
        self._is_copied.clear()
        self._rest = []
        left = frozenset(() if self._buffer.is_pinned() else later)
        for chunk, target in zip(self.layout.chunks, self._targets, strict=True):
            tensor = tensors[chunk.name]
            source = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if chunk.name.partition(".")[0] in left:
                self._rest.append((target, source.detach()))
            else:
                target.copy_(_dequantize(source), non_blocking=True)
        if self._buffer.is_pinned():
            self._fetched = torch.cuda.Event()
            self._fetched.record()

    @torch.no_grad()
    def finish_copy(self) -> None:
        """Copy the rest."""
        rest, self._rest = self._rest, []
        try:
            for target, source in rest:
                target.copy_(_dequantize(source))
        finally:
            self._is_copied.set()

    def wait_until_copied(self, timeout_s: float) -> bool:
        """Wait until `finish` has ended, at most `timeout_s`; whether it has."""
        return self._is_copied.wait(timeout_s)

    def iter_blocks(self) -> Iterator[bytes | memoryview]:
        """The shard file, in blocks."""
        if self._fetched is not None:
            self._fetched.synchronize()
        yield self.layout.build_header()
        content = self._buffer.numpy().data[: self.layout.size_bytes]
        for begin in range(0, len(content), BLOCK_BYTES):
            yield content[begin : begin + BLOCK_BYTES]


class DirectStaging(StagingBuffer):
    """No copy: the tensors themselves, which may not change until they are written. Takes no memory."""

    def __init__(self, layout: ShardLayout) -> None:
        self.layout = layout
        self._sources: list[torch.Tensor] = []

    def start_copy(self, tensors: Mapping[str, torch.Tensor], later: Collection[str] = ()) -> None:
        stored = [tensors[chunk.name] for chunk in self.layout.chunks]
        self._sources = [each.to_local() if isinstance(each, DTensor) else each for each in stored]

    def finish_copy(self) -> None:
        """Nothing is left to copy."""

    def wait_until_copied(self, timeout_s: float) -> bool:
        return True

    def iter_blocks(self) -> Iterator[bytes | memoryview]:
        sources, self._sources = self._sources, []
        yield self.layout.build_header()
        for source in sources:
            content = _dequantize(source).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            for begin in range(0, len(content), BLOCK_BYTES):
                yield content[begin : begin + BLOCK_BYTES]


def _dequantize(source: torch.Tensor) -> torch.Tensor:
    """The numbers that a state of a few bits stands for, until they are copied; any other tensor itself."""
    is_plain = type(source).dequantize is torch.Tensor.dequantize
    return source if is_plain else source.dequantize()


def has_cuda(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether any of them is on a GPU."""
    return any(tensor.is_cuda for tensor in tensors.values())
