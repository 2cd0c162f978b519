"""The memory of tensors while code runs, as reported by the allocator.

Owns the two sources: CUDA's statistics, and on the CPU the allocations that torch's profiler observes, those inside of
operators included. Called by the dry run and by the profiler, around single steps.
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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass
class MemoryGrowth:
    """peak_bytes: the largest allocation since the body began, without earlier allocations."""

    peak_bytes: int = 0
    _mapped: list[tuple[float, int]] = field(default_factory=list)  # microseconds of the wall clock, bytes

    def report_mapped(self, num_bytes: int, began_us: float) -> None:
        """Called when a permanent file was mapped: the profiler counts it, since this time, as an allocation."""
        self._mapped.append((began_us, -num_bytes))

    def compute_peak(self, changes: Iterable[tuple[float, int]]) -> None:
        """Find the peak of these events, of each thread in its order, without the mapped files."""
        live = 0
        for _, change in sorted([*self._mapped, *changes], key=lambda event: event[0]):
            live += change
            self.peak_bytes = max(self.peak_bytes, live)


def now_us() -> float:
    """The profiler's clock."""
    return time.time_ns() / 1e3


@contextmanager
def measure_growth(device: torch.device) -> Iterator[MemoryGrowth]:
    """Observe the allocations of this thread, and of Gloo's threads for it, in the body."""
    gc.collect()  # earlier garbage that is freed in the body would be subtracted
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with _observe_allocations(device) as growth:
            yield growth
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _observe_allocations(device: torch.device) -> Iterator[MemoryGrowth]:
    growth = MemoryGrowth()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield growth
        torch.cuda.synchronize(device)
        growth.peak_bytes = torch.cuda.max_memory_allocated(device) - before
        return
    # The profiler before Kineto: it starts in microseconds, and prints nothing.
    torch.autograd._enable_profiler_legacy(  # type: ignore[attr-defined]
        ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    )
    try:
        yield growth
    finally:
        threads = torch.autograd._disable_profiler_legacy()  # type: ignore[attr-defined]
        events: Iterable[Any] = (event for thread in threads for event in thread)
        growth.compute_peak(
            (event.start_us(), event.cpu_memory_usage()) for event in events if str(event.kind()) == "memory_alloc"
        )


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """The size of the storages behind the tensors, each once; of a distributed tensor, its part on this rank."""
    storages = {}
    for tensor in tensors:
        for storage in storages_of(tensor) if tensor is not None else ():
            is_fake = storage.device.type == "meta"  # which has no address
            storages[storage._cdata if is_fake else storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(storages.values())


def storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """A tensor's storages on this rank: one; of a sparse tensor, those of its indices and values; of a quantised one,
    those of its codes and scales."""
    here: Any = to_local(tensor)
    if is_traceable_wrapper_subclass(here):
        return [each for name in here.__tensor_flatten__()[0] for each in storages_of(getattr(here, name))]
    parts = [here._indices(), here._values()] if here.layout is torch.sparse_coo else [here]
    return [part.untyped_storage() for part in parts]


def to_local(tensor: Tensor) -> Tensor:
    """The part of a distributed tensor on this rank."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def state_of(modules: Iterable[nn.Module], optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """The tensors that outlive a step: of the modules, and of the optimiser."""
    modules = list(modules)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    buffers = [buffer for module in modules for buffer in module.buffers()]
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return {"parameters": parameters + buffers, "optimizer": states}
