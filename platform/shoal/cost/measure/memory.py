"""The memory that tensors take while something runs, as the allocator itself tells it.

Owns the two ways of asking: CUDA's statistics, and on the CPU the allocations that torch's profiler hears of, those
inside of operators included. Called by the dry run and by the probe, around single steps.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


@dataclass
class MemoryGrowth:
    """peak_bytes: the most that was allocated at once since the body began, without what was there before."""

    peak_bytes: int = 0
    _unseen_changes: list[tuple[float, int]] = field(default_factory=list)  # microseconds of the wall clock, bytes

    def report_freed(self, num_bytes: int) -> None:
        """Called on a thread that the profiler does not listen to, when it frees what was allocated in the body."""
        self._unseen_changes.append((now_us(), -num_bytes))

    def report_mapped(self, num_bytes: int, began_us: float) -> None:
        """Called when a file was mapped that stays: the profiler has heard of it, since this time, as if allocated."""
        self._unseen_changes.append((began_us, -num_bytes))

    def compute_peak(self, changes: Iterable[tuple[float, int]]) -> None:
        """The peak is what these make it, in the order of their times, with what was freed unheard."""
        live = 0
        for _, change in sorted([*changes, *self._unseen_changes]):
            live += change
            self.peak_bytes = max(self.peak_bytes, live)


def now_us() -> float:
    """By the clock that the profiler goes by."""
    return time.time_ns() / 1e3


@contextmanager
def track_growth(device: torch.device) -> Iterator[MemoryGrowth]:
    """Watch what this thread allocates in the body, and Gloo's threads in its name."""
    gc.collect()  # what is freed in the body was allocated in it: garbage of before would count against it
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with _track_allocations(device) as found:
            yield found
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _track_allocations(device: torch.device) -> Iterator[MemoryGrowth]:
    found = MemoryGrowth()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        torch.cuda.synchronize(device)
        found.peak_bytes = torch.cuda.max_memory_allocated(device) - before
        return
    # The profiler before Kineto: it starts in microseconds, and prints nothing.
    torch.autograd._enable_profiler_legacy(  # type: ignore[attr-defined]
        ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    )
    try:
        yield found
    finally:
        threads = torch.autograd._disable_profiler_legacy()  # type: ignore[attr-defined]
        events: Iterable[Any] = (event for thread in threads for event in thread)
        found.compute_peak(
            (event.start_us(), event.cpu_memory_usage()) for event in events if str(event.kind()) == "memory_alloc"
        )


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Of the storages behind the tensors, each once; of a distributed tensor, what lies on this rank."""
    storages = {}
    for tensor in tensors:
        for storage in storages_of(tensor) if tensor is not None else ():
            storages[storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(storages.values())


def storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """What of a tensor lies on this rank: one storage; of a sparse one, that of its indices and that of its values."""
    here = to_local(tensor)
    parts = [here._indices(), here._values()] if here.layout is torch.sparse_coo else [here]
    return [part.untyped_storage() for part in parts]


def to_local(tensor: Tensor) -> Tensor:
    """What of a distributed tensor lies on this rank."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def allocate_averages(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Tensors that take what an average of these takes on this rank; of at least float32, as a run keeps it."""
    here = [to_local(parameter) for parameter in parameters]
    numbers = [each for each in here if each.is_floating_point() or each.is_complex()]
    return [torch.empty_like(each, dtype=torch.promote_types(each.dtype, torch.float32)) for each in numbers]


def state_of(modules: Iterable[nn.Module], optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """The tensors that outlive a step: of the modules, and of the optimiser."""
    modules = list(modules)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    buffers = [buffer for module in modules for buffer in module.buffers()]
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return {"parameters": parameters + buffers, "optimizer": states}
