"""Where the rows of members live, and where they are computed: on the device, or, when more than fit, in host memory.

Owns the rows and the copies. Members in host memory pass through staging rows on the device: while a chunk is computed,
the next one is loaded and the last one stored. On a CUDA device copies run on streams of their own, from pinned memory;
on a CPU in a thread. No files. Called by MemberGroup; a chunk is opened by one thread at a time.

| queue | capacity | blocks | unblocked by | close() |
|---|---|---|---|---|
| free staging rows | two a thread, or what fits | the loader, when all are in use | a chunk's end | ends the loader |
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import psutil
import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.libs.population.member_rows import MemberRows, RowLayout

Part = tuple[int, int]  # the first row, and how many


class _DeviceRows:
    """Rows on the device for a chunk. On a CUDA device `loaded` comes when they may be read, and `released` when they
    may be written again: neither a kernel nor a copy reads them any longer, and their allocation is complete."""

    def __init__(self, rows: MemberRows, device: torch.device) -> None:
        self.rows = rows
        self.loaded = self.released = None
        if device.type == "cuda":
            self.loaded, self.released = torch.cuda.Event(), torch.cuda.Event()
            self.released.record(torch.cuda.current_stream(device))


class RowStore:
    """Rows of `num_members`, of which at most `resident` are on the device at once; None: all.

    max_chunk: the most members that can be opened together
    """

    def __init__(
        self,
        layout: RowLayout,
        num_members: int,
        slots: Sequence[str],
        device: torch.device,
        *,
        resident: int | None = None,
        threads: int = 1,
    ) -> None:
        self.device, self.is_resident = device, resident is None or resident >= num_members
        self.max_chunk = num_members
        self._loads: dict[Part, Future[_DeviceRows]] = {}
        self._loader: ThreadPoolExecutor | None = None
        self._narrowed: dict[Part, MemberRows] = {}
        self._streams: list[torch.cuda.Stream] | None = None  # of loads and of stores
        if self.is_resident:
            self._rows = MemberRows(layout, num_members, slots, device)
            return
        assert resident is not None
        num_staged = min(2 * threads, resident)
        self.max_chunk = resident // num_staged
        self._rows = MemberRows(layout, num_members, slots, "cpu", has_gradients=False, is_pinned=device.type == "cuda")
        self._free: queue.Queue[_DeviceRows] = queue.Queue()
        for _ in range(num_staged):
            self._free.put(_DeviceRows(MemberRows(layout, self.max_chunk, slots, device), device))
        self._loader = ThreadPoolExecutor(1, "population-loader")
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in range(2)]

    @property
    def rows(self) -> MemberRows:
        """Of all members, where they live. What closed chunks store has arrived."""
        if self._streams is not None:
            self._streams[1].synchronize()
        return self._rows

    @contextmanager
    def loading(self, parts: Sequence[Part]) -> Iterator[None]:
        """Load the parts in this order, as staging rows become free; within, each may be opened once, in that order."""
        if self._loader is None:
            yield
            return
        self._loads = {part: self._loader.submit(self._load, part) for part in parts}
        try:
            yield
        finally:
            for load in self._loads.values():  # of parts that were never opened
                if not load.cancel():
                    self._free.put(load.result())
            self._loads = {}
            for stream in self._streams or ():  # loads that were in vain too: they write to memory that may be freed
                stream.synchronize()

    @contextmanager
    def open(self, part: Part, *, is_changed: bool = True) -> Iterator[MemberRows]:
        """The rows of a part on the device. What is changed within is stored at the end."""
        if self._loader is None:
            if part not in self._narrowed:
                self._narrowed[part] = self._rows.narrow(*part)
            yield self._narrowed[part]
            return
        staged = self._loads.pop(part).result()
        try:
            if staged.loaded is not None:
                torch.cuda.current_stream(self.device).wait_event(staged.loaded)
            rows = staged.rows.narrow(0, part[1])
            yield rows
            if is_changed:
                sources, targets = rows.state(), self._rows.narrow(*part).state()
                if self._streams is not None:
                    self._streams[1].wait_stream(torch.cuda.current_stream(self.device))
                with torch.cuda.stream(self._streams[1]) if self._streams is not None else nullcontext():
                    _copy(sources, targets)
        finally:
            if self._streams is not None:  # the kernels of the chunk and its copy to the host read it until then
                assert staged.released is not None
                self._streams[1].wait_stream(torch.cuda.current_stream(self.device))
                staged.released.record(self._streams[1])
            self._free.put(staged)

    def close(self) -> None:
        """End the loader. Idempotent."""
        if self._loader is not None:
            self._loader.shutdown()

    def _load(self, part: Part) -> _DeviceRows:
        staged = self._free.get()
        sources, targets = self._rows.narrow(*part).state(), staged.rows.narrow(0, part[1]).state()
        if self._streams is None:
            _copy(sources, targets)
            return staged
        assert staged.loaded is not None
        assert staged.released is not None
        with torch.cuda.stream(self._streams[0]):
            staged.released.wait()
            _copy(sources, targets)
            staged.loaded.record()
        return staged


@torch.no_grad()
def _copy(sources: dict[str, Tensor], targets: dict[str, Tensor]) -> None:
    for name, source in sources.items():
        targets[name].copy_(source, non_blocking=True)


def plan_resident(
    layout: RowLayout, num_members: int, num_slots: int, device: torch.device, memory_bytes: int | None
) -> int | None:
    """Find how many members may be on the device at once; None: all.

    num_slots:    of the optimizer
    memory_bytes: of the device for rows; None: on a CUDA device 0.8 of what is free, on a CPU whatever is free
    Raises ConfigError when not even one member fits, or when the host's memory is too small for all.
    """
    size = layout.row_bytes(num_slots)
    total = size * num_members
    free = psutil.virtual_memory().available
    if total > free:
        problem = f"need {total / 1e9:.3g} GB of host memory, and {free / 1e9:.3g} GB are free"
        raise ConfigError("members", num_members, problem, "take fewer members")
    if memory_bytes is None:
        if device.type != "cuda":
            return None
        memory_bytes = int(0.8 * torch.cuda.mem_get_info(device)[0])
    if total <= memory_bytes:
        return None
    if size > memory_bytes:
        problem = f"one member takes {size / 1e6:.3g} MB"
        raise ConfigError("memory_bytes", memory_bytes, problem, "give more, or take smaller members")
    return memory_bytes // size
