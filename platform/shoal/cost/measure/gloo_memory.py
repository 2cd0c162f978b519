"""Waits until Gloo's threads have released the tensors of a collective.

A collective's Work holds its arguments and its own tensors, and Gloo's thread holds the Work a moment longer than the
caller waits for it. Allocations in that moment would count in addition; and if the thread released the memory last,
torch's profiler, which only observes threads that it knows, would miss that. So in a profiled step each wait for a
collective also waits for the release, and memory that Gloo's thread has freed is reported. Called by the operator
counter, for tensors on the CPU.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from shoal.cost.measure import collective_bytes
from shoal.cost.measure.memory import MemoryGrowth

POLL_S = 1e-4
OWN_REFERENCES = 3  # to a tensor: the list's, the check's, the count's
MAX_WAIT_S = 1.0  # for a thread; a count that is too high is better than a run that hangs
ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


@dataclass(frozen=True)
class WorkMemory:
    """The memory of a Work.

    tensors:  in memory that others use as well, in this Work's own objects
    storages: of its own memory
    """

    tensors: list[Tensor]
    storages: list[weakref.ref[Any]]

    def wait_until_released(self) -> None:
        """Wait until no other owner is left, for at most MAX_WAIT_S; then release it, too."""
        until_s = time.perf_counter() + MAX_WAIT_S
        while not self._is_released() and time.perf_counter() < until_s:
            time.sleep(POLL_S)
        self.tensors.clear()

    def _is_released(self) -> bool:
        for tensor in self.tensors:
            # C++ decrements the count before it releases the Python object.
            if tensor._use_count() > 1 or sys.getrefcount(tensor) > OWN_REFERENCES:  # type: ignore[attr-defined]
                return False
        return all(each() is None for each in self.storages)


class GlooMemoryTracker:
    """One for each metered step."""

    def __init__(self, grown: MemoryGrowth) -> None:
        self._growth = grown
        self._memory_by_storage: dict[int, WorkMemory] = {}  # by the id of a result's storage, until the wait for it
        self._works: list[TrackedWork] = []  # without a reference they would lose their Python half

    def run_collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """func(*args, **kwargs), a collective whose caller waits for the result or for the Work in it."""
        given: dict[int, Tensor] = {}

        def alias(tensor: Tensor) -> Tensor:
            other = tensor.detach()
            given[id(other)] = tensor
            return other

        passed = tree_map_only(Tensor, alias, (args, kwargs))
        with CollectiveAllocations(self._growth) as making:
            out = func(*passed[0], **passed[1])
        memory = making.find_work_memory(_tensors((passed, out)))
        out = tree_map_only(Tensor, lambda each: given[id(each)] if id(each) in given else each.detach(), out)
        if func.namespace == "c10d":
            return tree_map_only(torch.ScriptObject, lambda work: self._wrap_work(work, memory), out)
        for each in _tensors(out):
            self._memory_by_storage[id(each.untyped_storage())] = memory
        return out

    def _wrap_work(self, work: Any, memory: WorkMemory) -> Any:
        self._works.append(TrackedWork(dist.Work.unbox(work), memory))
        return self._works[-1].boxed()

    def release(self, result: Tensor) -> None:
        """Called after the wait for a functional collective's result."""
        memory = self._memory_by_storage.pop(id(result.untyped_storage()), None)
        if memory is not None:
            memory.wait_until_released()


class CollectiveAllocations(TorchDispatchMode):
    """A collective's allocations before a thread runs it: views of its arguments, and memory of its own."""

    def __init__(self, grown: MemoryGrowth) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._growth = grown
        self._thread = threading.get_ident()
        self._tensors: list[weakref.ref[Tensor]] = []
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if collective_bytes.is_collective(func):
            with self:  # nested operators must pass here, too
                return func.redispatch(ON_CPU, *args, **kwargs)
        out = func(*args, **kwargs)
        if threading.get_ident() == self._thread:
            for tensor in _tensors(out):
                self._tensors.append(weakref.ref(tensor))
                storage = tensor.untyped_storage()
                if id(storage) not in self._storages:
                    self._storages[id(storage)] = report_when_freed(storage, self._growth)
        return out

    def find_work_memory(self, tensors: Sequence[Tensor]) -> WorkMemory:
        """Add these, and views of them."""
        known = {id(each.untyped_storage()) for each in tensors}
        made = [each for each in (made() for made in self._tensors) if each is not None]
        views = [each for each in made if id(each.untyped_storage()) in known]
        each_once = {id(each): each for each in (*tensors, *views)}
        own = [storage for key, storage in self._storages.items() if key not in known]
        return WorkMemory(list(each_once.values()), own)


def report_when_freed(storage: torch.UntypedStorage, grown: MemoryGrowth) -> weakref.ref[Any]:
    """Report when a thread frees it that the profiler does not observe."""
    num_bytes = storage.nbytes()

    def tell(_: object) -> None:
        if not torch._C._autograd._profiler_enabled():
            grown.report_freed(num_bytes)

    return weakref.ref(storage, tell)


class TrackedWork(dist.Work):
    """A Work that releases another one after the wait for it, and waits for Gloo's release."""

    def __init__(self, work: dist.Work, memory: WorkMemory) -> None:
        super().__init__()
        self._work: dist.Work | None = work
        self._memory = memory

    def wait(self, *timeout: Any) -> bool:
        if self._work is not None:
            self._work.wait(*timeout)
            self._work = None
            self._memory.wait_until_released()
        return True

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def get_future(self) -> Any:
        if self._work is not None:
            return self._work.get_future()
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in tree_iter(value) if isinstance(each, Tensor)]
