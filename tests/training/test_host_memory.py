"""Sums and messages through memory that the ranks of one host share: right, in order, told when somebody is gone."""

import os
import signal
import socket
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from programs import RanksFailed, run_ranks
from shoal.parallel import World
from shoal.parallel.comm import shm_all_reduce, shm_rendezvous
from shoal.parallel.comm.shm_all_reduce import ShmAllReduce
from shoal.parallel.comm.shm_p2p import ShmP2P

TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-15, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
T = TypeVar("T", ShmAllReduce, ShmP2P)


def formed(kind: type[T]) -> T:
    group = dist.group.WORLD
    assert group is not None
    found = kind.try_create(group)
    assert found is not None
    return found


def values_of(rank: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator).mul_(100).to(dtype)


def sums(world: World, sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    """The program of a rank: a sum for each size, twice, so that the turns come round."""
    shm_all_reduce.CHUNK_BYTES = 4096
    mine = formed(ShmAllReduce)
    found = [mine.sum(values_of(world.rank, size, dtype).view(-1, 1), 0.5) for size in sizes * 2]
    mine.close()
    return found


def sums_of_each(world: World, sizes: list[int]) -> dict[torch.dtype, list[Tensor]]:
    return {dtype: sums(world, sizes, dtype) for dtype in TOLERANCES}


def test_every_rank_has_the_same_sum_in_every_bit() -> None:
    sizes = [1, 7, 1000, 5000]  # the last ones in several parts
    every_rank = run_ranks(sums_of_each, 3, sizes)
    for dtype, tolerance in TOLERANCES.items():
        for index, size in enumerate(sizes * 2):
            first = every_rank[0][dtype][index]
            assert first.shape == (size, 1)
            assert all(torch.equal(each[dtype][index], first) for each in every_rank)
            expected = sum(values_of(rank, size, dtype).double() for rank in range(3)) * 0.5
            torch.testing.assert_close(first.double().view(-1), expected, rtol=tolerance, atol=100 * tolerance)


def gathered(world: World) -> tuple[Tensor, float]:
    mine = formed(ShmAllReduce)
    return mine.gather(torch.tensor([[float(world.rank), 10.0]])), mine.sent_bytes


def test_gathers_in_the_order_of_ranks() -> None:
    for everyone, sent_bytes in run_ranks(gathered, 3):
        assert everyone.tolist() == [[[0.0, 10.0]], [[1.0, 10.0]], [[2.0, 10.0]]]
        assert sent_bytes == 16.0  # eight bytes to each of two


def gathered_and_scattered(world: World) -> list[tuple[Tensor, Tensor]]:
    """For each size: everyone's values, and this rank's part of the mean of other values."""
    mine, found = formed(ShmAllReduce), list[tuple[Tensor, Tensor]]()
    mine.reserve(3 * 3000 * 4)
    for size in (5, 3000, 3000, 7):
        everyone, own = mine.lend(mine.gathered, 3 * size, torch.float32), torch.zeros(size)
        part = everyone.view(3, size)[world.rank].copy_(values_of(world.rank, size))
        mine.gather_lent(part)
        copied = everyone.clone()
        parts = mine.lend(mine.pieces[world.rank], 3 * size, torch.float32)
        mine.sum_scattered(own, parts.copy_(values_of(world.rank, 3 * size)), 1 / 3)
        found.append((copied, own))
    return found


def test_shards_are_gathered_and_their_gradients_averaged() -> None:
    every_rank = run_ranks(gathered_and_scattered, 3)
    for rank, found in enumerate(every_rank):
        for everyone, own in found:
            size = own.numel()
            assert torch.equal(everyone, torch.cat([values_of(other, size) for other in range(3)]))
            expected = sum(values_of(other, 3 * size) for other in range(3)).view(3, size)[rank] / 3  # type: ignore[union-attr]
            torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-4)


def in_turn(world: World) -> None:
    """A rank that is slow to look at what it got must not see the next round's values."""
    mine = formed(ShmAllReduce)
    for step in range(200):
        if step % 7 == world.rank:
            os.sched_yield()
        assert mine.sum(torch.full((300,), float(step + world.rank))).unique().tolist() == [2.0 * step + 1.0]


def out_of_step(world: World) -> None:
    """One rank has skipped a sum that the other makes."""
    with pytest.raises(RuntimeError, match=r"ranks sum different things: [45] values here, [45] there"):
        formed(ShmAllReduce).sum(torch.ones(4 + world.rank))
    world.barrier()


def apart(world: World) -> None:
    """Ranks that cannot share memory, for a reason that all of them know, or that only one meets."""

    def refused(*args: Any) -> Any:
        raise PermissionError

    for owner, name, value in (
        (shm_rendezvous, "identify_host", lambda: "elsewhere"),
        (shm_all_reduce, "_map_shared_memory", refused),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == 1:
                patch.setattr(owner, name, value)
            group = dist.group.WORLD
            assert group is not None
            assert ShmAllReduce.try_create(group) is None
            assert world.gather(world.rank) == [0, 1]


def stranger(world: World) -> None:
    """Another process connects to the first rank before the others do."""
    gathered_by_all = shm_rendezvous._all_gather

    def gathered_and_connected(value: Any, group: Any) -> list[Any]:
        values = gathered_by_all(value, group)
        if world.rank == 1 and isinstance(value, tuple):
            line.connect(values[0][1])
            line.sendall(bytes(16) + (1).to_bytes(4, "little"))
        return values

    with pytest.MonkeyPatch.context() as patch, socket.socket(socket.AF_UNIX) as line:
        patch.setattr(shm_rendezvous, "_all_gather", gathered_and_connected)
        assert formed(ShmAllReduce).sum(torch.tensor([float(world.rank)])).tolist() == [1.0]


def nothing_left_open(world: World) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    mine = formed(ShmAllReduce)
    mine.sum(torch.ones(3))
    mine.close()
    mine.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


def tensor_of(index: int) -> Tensor:
    """Many shapes and dtypes, one without an element, one with many."""
    size = [0, 1, 7, 1000, 20_000][index % 5]
    values = torch.arange(size).add(index).remainder(3).to(DTYPES[index % len(DTYPES)])
    return values.view(-1, 1) if index % 2 else values


def exchanged(world: World, count: int) -> tuple[list[Tensor], float]:
    """Everybody sends everything to everybody before anybody reads: a send that waited would wait for ever."""
    mine, others = formed(ShmP2P), [rank for rank in range(world.size) if rank != world.rank]
    for index in range(count):
        for other in others:
            mine.send(tensor_of(index + world.rank), other)
    asked = []
    for other in others:
        for index in range(count):
            wanted = torch.empty_like(tensor_of(index + other))
            asked.append((wanted, mine.receive(wanted, other)))
    for _, work in reversed(asked):  # in another order than they come
        work.wait()
    world.barrier()
    mine.close()
    return [wanted for wanted, _ in asked], mine.sent_bytes


def test_whatever_is_sent_arrives_in_its_order() -> None:
    count = 500  # the notes of which fill a socket
    for rank, (found, sent_bytes) in enumerate(run_ranks(exchanged, 3, count)):
        others = [other for other in range(3) if other != rank]
        expected = [tensor_of(index + other) for other in others for index in range(count)]
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert sent_bytes == 2 * sum(tensor_of(index + rank).nbytes for index in range(count))


def there_and_back(world: World) -> None:
    """There and back, many times: pieces of memory are used again."""
    mine = formed(ShmP2P)
    other = 1 - world.rank
    values = torch.zeros(1000)
    for _ in range(100):
        if world.rank == 0:
            mine.send(values, other)
        mine.receive(values, other).wait()
        values += 1
        last = float(values[-1])
        if world.rank == 1:
            mine.send(values, other)
    assert last == (200.0, 199.0)[world.rank]
    assert len(mine._channels[other].buffers) <= 2


def strided(world: World) -> None:
    """A view is sent as it is read."""
    mine, view = formed(ShmP2P), torch.arange(12.0).view(3, 4).t()
    if world.rank == 0:
        mine.send(view, 1)
    else:
        received = torch.empty(4, 3)
        mine.receive(received, 0).wait()
        assert torch.equal(received, view)
    world.barrier()


def surprised(world: World) -> None:
    """A message of another size."""
    mine = formed(ShmP2P)
    mine.send(torch.ones(4), 1 - world.rank)
    with pytest.raises(RuntimeError, match="sent 16 bytes, where 12 were expected"):
        mine.receive(torch.empty(3), 1 - world.rank).wait()
    world.barrier()


def nothing_left_open_by_messages(world: World) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    mine = formed(ShmP2P)
    mine.send(torch.ones(3), 1 - world.rank)
    mine.receive(torch.empty(3), 1 - world.rank).wait()
    world.barrier()
    mine.close()
    mine.close()
    assert set(os.listdir("/proc/self/fd")) <= set(before)  # gloo may have closed one of its own meanwhile


def left_alone(world: World) -> None:
    sums, messages = formed(ShmAllReduce), formed(ShmP2P)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        _ = [sums.sum(torch.ones(3)) for _ in range(3)]
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        messages.receive(torch.empty(3), 1).wait()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        messages.send(torch.empty(3), 1)


def test_a_dead_rank_is_noticed_at_once() -> None:
    with pytest.raises(RanksFailed) as raised:
        run_ranks(left_alone, 3)
    assert list(raised.value.causes) == [1]


def waits_too_long(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shm_rendezvous, "TIMEOUT_S", 1.0)
        sums, messages = formed(ShmAllReduce), formed(ShmP2P)
        if world.rank == 0:
            with pytest.raises(RuntimeError, match="Timed out"):
                sums.sum(torch.ones(3))
            with pytest.raises(RuntimeError, match="Timed out"):
                messages.receive(torch.empty(3), 1).wait()
    world.barrier()


def play_all(world: World) -> None:
    for scene in (nothing_left_open, in_turn, stranger, apart, waits_too_long, out_of_step):
        scene(world)
    for scene in (nothing_left_open_by_messages, there_and_back, strided, surprised):
        scene(world)


def test_two_ranks() -> None:
    """In one start: each scene asserts for itself."""
    run_ranks(play_all, 2)
