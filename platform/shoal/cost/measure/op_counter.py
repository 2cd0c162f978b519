"""The cost of one step, operator by operator: live bytes, floating point operations, bytes sent to other ranks.

Owns a dispatch mode that is entered for single steps, in a dry run and in a running Trainer alike; other steps are
unaffected. Never changes results, and keeps no tensor alive but mapped files.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shoal.batch_tree import tensors_of
from shoal.cost.measure import collective_bytes, flop_formulas
from shoal.cost.measure.memory import MemoryGrowth, now_us, storages_of

RELEASE_S = 0.015  # after a collective: Gloo's thread wakes the caller first


@dataclass
class OpCounts:
    """The counts between entering and leaving.

    resident_bytes: of earlier storages: named by `include`, or used by the forward pass
    peak_bytes:     the most that was alive at once, including resident_bytes
    saved_bytes:    alive when the first backward pass began, without resident_bytes: the activations
    collectives:    by their ranks: how many collectives, and the bytes that this rank sends in them
    unknown:        operators with unknown arithmetic, with their numbers of calls
    live_bytes:     for each operator, the most that was alive since the one before it, without resident_bytes
    backward:       the first operator of the first backward pass, and the end of the last one
    """

    resident_bytes: int = 0
    peak_bytes: int = 0
    saved_bytes: int = 0
    flops_forward: float = 0.0
    flops_backward: float = 0.0
    sent_bytes: float = 0.0
    sent: Counter[str] = field(default_factory=Counter)
    collectives: dict[tuple[int, ...], tuple[int, float]] = field(default_factory=dict)
    unknown: Counter[str] = field(default_factory=Counter)
    live_bytes: list[int] = field(default_factory=list)
    backward: tuple[int, int] = (0, 0)

    @property
    def flops(self) -> float:
        return self.flops_forward + self.flops_backward


class OpCounter(TorchDispatchMode):
    """Counts in `reading` while entered; one use each.

    An operator that takes functions (such as attention with a score function) is one call of unknown arithmetic: its
    inside is not counted. Code of torch.compile runs as without a counter; the operators that it calls are counted.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, grown: MemoryGrowth, is_fake: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_fake = is_fake
        self._thread = threading.get_ident()
        self._growth = grown
        self.counts = OpCounts()
        self._mapped: list[Tensor] = []
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}  # by the storage's id
        self._allocated_bytes = 0  # since entering, and still alive
        self._peak_bytes = self._recent_bytes = 0
        self._in_backward = False

    def include(self, tensors: Iterable[Tensor], storages: Iterable[torch.UntypedStorage] = ()) -> None:
        """Count these as existing from the beginning, used or not."""
        for storage in (*(each for tensor in tensors for each in storages_of(tensor)), *storages):
            self._note_storage(storage, is_new=False)

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Exclude the storages of these."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            self._alive[id(storage)] = (weakref.ref(storage, self._make_finalizer(id(storage), False)), 0)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, Tensor) and hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # a DTensor or similar: its inner operators are counted, on this rank's part
        kwargs = kwargs or {}
        if threading.get_ident() != self._thread and not any(each.is_cuda for each in tensors_of((args, kwargs))):
            return func(*args, **kwargs)  # on Gloo's own threads, which move their own copies
        for each in tensors_of((args, kwargs)):
            self._note_tensor(each, is_new=False)
        if not self._in_backward and torch._C._current_graph_task_id() != -1:
            self._in_backward = True
            self.counts.saved_bytes = self._allocated_bytes
            self.counts.backward = (len(self.counts.live_bytes),) * 2
        if func is torch.ops.aten.from_file.default:
            # A file in memory (for messages between ranks of a host, for example) is not the allocator's, and not
            # counted. It is kept alive, since the profiler would also count its release, at an unknown time.
            began_us = now_us()
            mapped: Tensor = func(*args, **kwargs)
            self._growth.report_mapped(mapped.untyped_storage().nbytes(), began_us)
            self._mapped.append(mapped)
            self.exclude([mapped])
            return mapped
        out = self._call(func, args, kwargs)
        if self._is_fake and not isinstance(func, HigherOrderOperator):
            for each in collective_bytes.find_scratch_tensors(func, args, out):
                torch.empty_like(each)
                self._grow(each.nbytes)
                self._allocated_bytes -= each.nbytes
        for each in tensors_of(out):
            self._note_tensor(each, is_new=True)
        self._count(func, args, kwargs, out)
        self.counts.live_bytes.append(self._recent_bytes)
        self._recent_bytes = self._allocated_bytes
        if torch._C._current_graph_task_id() != -1:
            self.counts.backward = self.counts.backward[0], len(self.counts.live_bytes)
        return out

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A collective of Gloo has ended when this returns, as those of a fake group, and Gloo's thread has dropped it.

        That thread holds the tensors a moment longer than a caller waits. Allocations of that moment would count in
        addition, and the profiler would not see what the thread frees.
        """
        out = func(*args, **kwargs)
        is_gloo = not self._is_fake and not isinstance(func, HigherOrderOperator) and collective_bytes.is_on_cpu(args)
        if is_gloo and collective_bytes.is_collective(func):
            for each in tree_iter(out):
                if isinstance(each, torch.ScriptObject):
                    dist.Work.unbox(each).wait()
                elif func.namespace != "c10d":
                    torch.ops._c10d_functional.wait_tensor(each)
            time.sleep(RELEASE_S)
        return out

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if isinstance(func, HigherOrderOperator):
            self.counts.unknown[func.name()] += 1
            return
        operations = flop_formulas.count_flops(func, args, kwargs, out)
        if operations is None:
            self.counts.unknown[str(func._overloadpacket)] += 1
        elif torch._C._current_graph_task_id() != -1:
            self.counts.flops_backward += operations
        else:
            self.counts.flops_forward += operations
        sent = collective_bytes.sent_bytes(func, args, out)
        if sent:
            self.counts.sent_bytes += sent
            self.counts.sent[func._overloadpacket.__name__] += int(sent)
        if collective_bytes.is_collective(func):
            ranks = collective_bytes.find_group_ranks(func, args)
            num_calls, sent_bytes = self.counts.collectives.get(ranks, (0, 0.0))
            self.counts.collectives[ranks] = num_calls + 1, sent_bytes + sent

    def _note_tensor(self, tensor: Tensor, is_new: bool) -> None:
        for storage in storages_of(tensor):
            self._note_storage(storage, is_new)

    def _note_storage(self, storage: torch.UntypedStorage, is_new: bool) -> None:
        if id(storage) in self._alive:
            return
        size = storage.nbytes()
        self._alive[id(storage)] = (weakref.ref(storage, self._make_finalizer(id(storage), is_new)), size)
        if is_new:
            self._grow(size)
        elif not self._in_backward:  # in backward, unknown storages are those that a collective has made for itself
            self.counts.resident_bytes += size

    def _make_finalizer(self, key: int, is_new: bool) -> Callable[[Any], None]:
        myself = weakref.ref(self)

        def forget(_: Any) -> None:
            meter = myself()
            if meter is not None:
                _, size = meter._alive.pop(key)
                meter._allocated_bytes -= size

        return forget

    def _grow(self, size: int) -> None:
        self._allocated_bytes += size
        self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)
        self._recent_bytes = max(self._recent_bytes, self._allocated_bytes)


@contextmanager
def count_ops(
    grown: MemoryGrowth | None = None,
    resident: Iterable[Tensor] = (),
    buckets: Iterable[torch.UntypedStorage] = (),
    is_fake: bool = False,
    elsewhere: Iterable[Tensor] = (),
) -> Iterator[OpCounts]:
    """Count the body's operators; the counts are complete when the body has ended.

    grown:             records memory, and gets corrections that it cannot observe
    resident, buckets: tensors, and storages, that always exist (parameters, optimiser state), used or not
    is_fake:           the group is fake; allocations of a real one are made in its place
    elsewhere:         tensors in memory that is not this rank's own
    """
    meter = OpCounter(grown or MemoryGrowth(), is_fake)
    meter.exclude(elsewhere)
    meter.include(resident, buckets)
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        # FSDP frees and restores gathered parameters by resizing storages in place, without an
        # operator.
        if id(storage) not in meter._alive:
            meter._alive[id(storage)] = (weakref.ref(storage, meter._make_finalizer(id(storage), True)), 0)
        reference, before = meter._alive[id(storage)]
        meter._alive[id(storage)] = (reference, storage.nbytes())
        meter._grow(storage.nbytes() - before)
        return result

    torch.UntypedStorage.resize_ = resize_and_tell  # type: ignore[method-assign, assignment]
    try:
        with meter:
            yield meter.counts
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        meter.counts.peak_bytes = meter.counts.resident_bytes + meter._peak_bytes
