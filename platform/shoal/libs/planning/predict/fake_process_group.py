"""A process group in which only this process exists: it simulates each of its ranks in turn.

Collectives return at once, with this rank's values as everybody's; rank 0's broadcasts, and the stages' messages about
shapes, are kept from rank to rank. Entered by `rank_step` alone. Everything is restored afterwards.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal.errors import PlanError
from shoal.extend.parallel import ShmAllReduce, ShmP2P, World

T = TypeVar("T")


class NotYetSent(Exception):
    """A rank waits for a message of one that was not simulated so far."""


@dataclass
class SimulatedRanks:
    """The messages of one round: from rank 0 to all, and from rank to rank.

    shared_sums: of the simulated rank through shared memory: the ranks, and the bytes that this rank sends
    """

    broadcasts: list[bytes] = field(default_factory=list)
    messages: dict[tuple[int, int], list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    shared_sums: list[tuple[tuple[int, ...], float]] = field(default_factory=list)


@dataclass(frozen=True)
class _FakeWorld(World):
    """A world whose other ranks have this one's values."""

    play: SimulatedRanks = field(default_factory=SimulatedRanks)
    _num_received: list[int] = field(default_factory=lambda: [0])

    def broadcast(self, value: T) -> T:
        place = self._num_received[0]
        self._num_received[0] += 1
        if place == len(self.play.broadcasts):
            if not self.is_first:
                raise NotYetSent
            self.play.broadcasts.append(pickle.dumps(value))
        heard: T = pickle.loads(self.play.broadcasts[place])
        return heard

    def gather(self, value: T) -> list[T]:
        return [value] * self.size

    def barrier(self) -> None:
        """No process to wait for."""


@contextmanager
def fake_world(rank: int, size: int, device: torch.device, play: SimulatedRanks) -> Iterator[World]:
    """This process as one rank of `size`. Raises PlanError when it is in a group already."""
    if size == 1:
        yield World(0, 1, device)
        return
    if dist.is_initialized():
        raise PlanError("workers", size, "the cost of a plan is told before a process joins a group", "ask earlier")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    originals = DistributedDataParallel.__init__, ShmAllReduce.try_create, ShmP2P.try_create, dist.send, dist.recv

    def reduce(group: Any, bucket: Any) -> Any:
        dist.all_reduce(bucket.buffer(), group=group)
        answer: torch.futures.Future[Tensor] = torch.futures.Future()
        answer.set_result(bucket.buffer())
        return answer

    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        originals[0](self, *args, **kwargs)
        self.register_comm_hook(self.process_group, lambda state, bucket: reduce(state, bucket))

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    ShmAllReduce.try_create = partial(_FakeAllReduce, sums=play.shared_sums)  # type: ignore[method-assign]
    ShmP2P.try_create = _FakeP2P  # type: ignore[method-assign]
    for pair in [pair for pair in play.messages if pair[0] == rank]:
        del play.messages[pair]  # this rank is simulated again
    num_read: dict[int, int] = defaultdict(int)

    def send(
        tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None
    ) -> None:
        if group_dst is not None:
            play.messages[rank, dist.get_global_rank(group, group_dst)].append(tensor.detach().clone())

    def recv(
        tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None
    ) -> int:
        if group_src is None:  # schedules vote this way whether shapes are known, which they are
            tensor.fill_(1)
            return int(src or 0)
        sender = dist.get_global_rank(group, group_src)
        messages = play.messages.get((sender, rank), [])
        if num_read[sender] == len(messages):
            raise NotYetSent
        tensor.copy_(messages[num_read[sender]])
        num_read[sender] += 1
        return sender

    dist.send, dist.recv = send, recv
    try:
        yield _FakeWorld(rank, size, device, play=play)
    finally:
        DistributedDataParallel.__init__, ShmAllReduce.try_create, ShmP2P.try_create, dist.send, dist.recv = originals  # type: ignore[method-assign]
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # of distributed tensors, which still refers to this rank's groups


class _FakeAllReduce(ShmAllReduce):
    """Instead of shared memory: this rank's values count as everybody's. The ranks are assumed to be on one host, which
    only affects how much memory gradients take in transit."""

    def __init__(self, group: dist.ProcessGroup, sums: list[tuple[tuple[int, ...], float]]) -> None:
        self._ranks, self._sums = tuple(dist.get_process_group_ranks(group)), sums
        self.size = dist.get_world_size(group)
        self.waited_s = self.sent_bytes = 0.0
        self.rank, self.gathered = 0, torch.empty(0)
        self.memory = torch.empty(0, dtype=torch.uint8)

    def sum(self, values: Tensor, factor: float = 1.0) -> Tensor:
        self._record(2 * values.nbytes * (self.size - 1) / self.size)
        return values.mul_(factor)

    def next_row(self, like: Tensor) -> Tensor:
        if self.memory.nbytes < like.nbytes:
            self.memory = torch.empty(like.nbytes, dtype=torch.uint8)
        return self.memory[: like.nbytes].view(like.dtype)

    def sum_rows(self, values: list[Tensor], divide: Callable[[Tensor], list[Tensor]]) -> None:
        self._record(2 * sum(each.nbytes for each in values) * (self.size - 1) / self.size)
        torch._foreach_mul_(values, float(self.size))

    def gather(self, mine: Tensor) -> Tensor:
        self._record(mine.nbytes * (self.size - 1))
        return mine.expand(self.size, *mine.shape).clone()

    def reserve(self, size_bytes: int) -> None:
        self.gathered = torch.empty(size_bytes, dtype=torch.uint8)
        self.pieces = [torch.empty_like(self.gathered)]

    def lend(self, piece: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        return piece[: size * dtype.itemsize].view(dtype)

    def gather_lent(self, mine: Tensor) -> None:
        self._record(mine.nbytes * (self.size - 1))

    def sum_scattered(self, total: Tensor, parts: Tensor, factor: float = 1.0) -> None:
        self._record(parts.nbytes * (self.size - 1) / self.size)
        torch.mul(parts.view(self.size, -1)[0], factor, out=total)

    def _record(self, sent_bytes: float) -> None:
        self.sent_bytes += sent_bytes
        self._sums.append((self._ranks, sent_bytes))

    def close(self) -> None:
        """Nothing to leave."""


class _FakeP2P(ShmP2P):
    """Instead of shared memory: a message has arrived at once, with the present content of the receiver's tensor."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(dist.get_rank(group), {})

    def send(self, tensor: Tensor, to: int) -> Any:
        self.sent_bytes += tensor.nbytes
        return _Arrived()

    def receive(self, tensor: Tensor, sender: int) -> Any:
        return _Arrived()


class _Arrived:
    def wait(self) -> bool:
        return True
