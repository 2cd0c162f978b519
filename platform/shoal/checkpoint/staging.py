"""The copy of the state that is written while training goes on: one buffer, allocated once and used for every save.

Its bytes are those of the shard file, in the file's order. From CUDA the copies are queued on the current stream, so
that later kernels of that stream wait for them and the host does not; the buffer is then pinned.

Called by `checkpointer` (fill: the training thread; pieces: the background thread, one save at a time).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.distributed.tensor import DTensor

from shoal.checkpoint.folder import BLOCK_BYTES
from shoal.checkpoint.layout import Layout

SPLIT_BYTES = 8 << 20  # below this a second thread costs more than it saves
Copy = tuple[torch.Tensor, torch.Tensor]  # target, source


class Staging:
    """The buffer for one layout. Memory: as much as this rank writes."""

    _buffer: torch.Tensor

    def __init__(self, layout: Layout, pinned: bool, old: Staging | None = None) -> None:
        self.layout = layout
        buffer = None if old is None else old._buffer
        if buffer is None or buffer.numel() < layout.size_bytes or buffer.is_pinned() != pinned:
            # Zeros, written now: the first touch of fresh pages takes as long as ten copies.
            buffer = torch.empty(layout.size_bytes, dtype=torch.uint8, pin_memory=pinned).zero_()
        self._buffer = buffer
        self._targets = [self._buffer[slot.begin : slot.end].view(slot.dtype).view(slot.sizes) for slot in layout.slots]
        self._copied: torch.cuda.Event | None = None

    def fill(self, tensors: Mapping[str, torch.Tensor], helper: ThreadPoolExecutor) -> None:
        """Copy this rank's part of the state. When it returns, the state may change (in stream order, on CUDA)."""
        sources = [_local(tensors[slot.name]) for slot in self.layout.slots]
        copies = list(zip(self._targets, sources, strict=True))
        if self._buffer.is_pinned():
            _copy(copies)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
            return
        mine, others = _halves(copies)
        other_half = helper.submit(_copy, others) if others else None
        _copy(mine)
        if other_half is not None:
            other_half.result()

    def pieces(self) -> Iterator[bytes | memoryview]:
        """The shard file, in blocks."""
        if self._copied is not None:
            self._copied.synchronize()
        yield self.layout.header()
        content = self._buffer.numpy().data[: self.layout.size_bytes]
        for begin in range(0, len(content), BLOCK_BYTES):
            yield content[begin : begin + BLOCK_BYTES]


def on_cuda(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether any of them has to be fetched from a GPU."""
    return any(tensor.is_cuda for tensor in tensors.values())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _copy(copies: list[Copy]) -> None:
    for target, source in copies:
        target.copy_(source, non_blocking=True)


def _halves(copies: list[Copy]) -> tuple[list[Copy], list[Copy]]:
    """The same copies for two threads, about equally many bytes each; the one in the middle is cut in two."""
    half = sum(target.nbytes for target, _ in copies) // 2
    if half < SPLIT_BYTES:
        return copies, []
    first: list[Copy] = []
    for position, (target, source) in enumerate(copies):
        if target.nbytes <= half:
            first.append((target, source))
            half -= target.nbytes
            continue
        rest = copies[position + 1 :]
        if half < SPLIT_BYTES or not source.is_contiguous():
            return first, [(target, source), *rest]
        cut = half // target.itemsize
        flat, flat_source = target.view(-1), source.detach().view(-1)
        return [*first, (flat[:cut], flat_source[:cut])], [(flat[cut:], flat_source[cut:]), *rest]
    return first, []
