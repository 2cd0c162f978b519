"""Messages through memory that the ranks of one host share: whole, in order, never waiting to be sent; told of ends."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from programs import RanksFailed, run_ranks
from shoal.parallel import World
from shoal.parallel.comm import shm_rendezvous
from shoal.parallel.comm.shm_p2p import ShmP2P

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def formed() -> ShmP2P:
    group = dist.group.WORLD
    assert group is not None
    found = ShmP2P.try_create(group)
    assert found is not None
    return found


def tensor_of(index: int) -> Tensor:
    """Many shapes and dtypes, one without an element, one with many."""
    size = [0, 1, 7, 1000, 100_000][index % 5]
    values = torch.arange(size).add(index).remainder(3).to(DTYPES[index % len(DTYPES)])
    return values.view(-1, 1) if index % 2 else values


def exchanged(world: World, count: int) -> tuple[list[Tensor], float]:
    """Everybody sends everything to everybody before anybody reads: a send that waited would wait for ever."""
    mine, others = formed(), [rank for rank in range(world.size) if rank != world.rank]
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


def in_turn(world: World) -> None:
    """There and back, many times: pieces of memory are used again."""
    mine, other, values = formed(), 1 - world.rank, torch.zeros(1000)
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
    mine, view = formed(), torch.arange(12.0).view(3, 4).t()
    if world.rank == 0:
        mine.send(view, 1)
    else:
        received = torch.empty(4, 3)
        mine.receive(received, 0).wait()
        assert torch.equal(received, view)
    world.barrier()


def left_alone(world: World) -> None:
    mine = formed()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        mine.receive(torch.empty(3), 1).wait()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        mine.send(torch.empty(3), 1)


def test_a_dead_rank_is_noticed_at_once() -> None:
    with pytest.raises(RanksFailed) as raised:
        run_ranks(left_alone, 3)
    assert list(raised.value.causes) == [1]


def surprised(world: World) -> None:
    """A message of another size."""
    mine = formed()
    mine.send(torch.ones(4), 1 - world.rank)
    with pytest.raises(RuntimeError, match="sent 16 bytes, where 12 were expected"):
        mine.receive(torch.empty(3), 1 - world.rank).wait()
    world.barrier()


def waits_too_long(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shm_rendezvous, "TIMEOUT_S", 1.0)
        mine = formed()
        if world.rank == 0:
            with pytest.raises(RuntimeError, match="Timed out"):
                mine.receive(torch.empty(3), 1).wait()
    world.barrier()


def nothing_left_open(world: World) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    mine: Any = formed()
    mine.send(torch.ones(3), 1 - world.rank)
    mine.receive(torch.empty(3), 1 - world.rank).wait()
    world.barrier()
    mine.close()
    mine.close()
    assert set(os.listdir("/proc/self/fd")) <= set(before)  # gloo may have closed one of its own meanwhile


def play_all(world: World) -> None:
    for scene in (nothing_left_open, in_turn, strided, surprised, waits_too_long):
        scene(world)


def test_two_ranks() -> None:
    """In one start: each scene asserts for itself."""
    run_ranks(play_all, 2)
