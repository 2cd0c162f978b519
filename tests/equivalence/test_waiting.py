"""The time that a rank waits for others: every collective of a step is in it, whoever calls it, and nothing else."""

import threading
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from cases import build, global_batch, share
from torch.utils._python_dispatch import TorchDispatchMode

from programs import run_ranks
from shoal.parallel import ParallelSpec, World
from shoal.parallel.comm import collective_timer
from shoal.parallel.comm.collective_timer import CollectiveTimer
from waiting import wait_for

GLOO = {"backend": "gloo"}  # sums through memory, which keep their own time, are left out
PLANS = {
    2: {"fsdp": GLOO | {"shard": True}, "tensor": GLOO | {"data": 1, "tensor": 2}},
    4: {"hsdp": GLOO | {"shard": True, "replicate": 2}, "fsdp and tensor": GLOO | {"shard": True, "tensor": 2}},
}
NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")


class Collectives(TorchDispatchMode):
    """How many this rank enters."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        self.number += func.namespace in ("c10d", "_c10d_functional") and name not in NO_COLLECTIVES
        return func(*args, **(kwargs or {}))


def waited(world: World) -> dict[str, tuple[float, float, int]]:
    """By plan: the seconds of a step, and with a clock that ticks when it is read, the waits and the collectives."""
    found = {}
    for name, plan in PLANS[world.size].items():
        parallel = build("mixture", ParallelSpec.parse(plan), world)
        batch = share(global_batch(0), parallel.data_rank, parallel.num_data_ranks)
        parallel.train_step(batch, 0)
        waited_s = parallel.communication_s
        clock, collective_timer.time = collective_timer.time, SimpleNamespace(perf_counter=count().__next__)
        try:
            with Collectives() as collectives:
                parallel.train_step(batch, 1)
        finally:
            collective_timer.time = clock
        dist.barrier()  # outside a step
        found[name] = waited_s, parallel.communication_s - waited_s, collectives.number
    return found


@pytest.mark.parametrize("size", PLANS)
def test_every_collective_of_a_step_is_waited_for(size: int) -> None:
    for found in run_ranks(waited, size):
        assert found.keys() == PLANS[size].keys()
        for name, (waited_s, num_waits, num_collectives) in found.items():
            assert 0 < waited_s < 60, name
            assert num_waits == pytest.approx(num_collectives), name
            assert num_collectives > 0, name


def helped_by_a_thread(world: World, folder: Path) -> float:
    """Rank 1 begins when a thread of rank 0 says so, which takes a while: by then rank 0 waits."""
    waits = threading.Event()

    def say_so() -> None:
        waits.wait()
        for _ in range(20):
            time.sleep(0.01)  # each time, the thread needs the interpreter again
        (folder / "go").touch()

    if world.rank == 0:
        threading.Thread(target=say_so, daemon=True).start()
    else:
        wait_for((folder / "go").exists, what="a word of rank 0")
    total = functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
    waiting_s = CollectiveTimer(world.device)
    with waiting_s.time_collectives():
        waits.set()
        assert total.wait().item() == 2
    return waiting_s.waited_s


def test_other_threads_go_on_while_a_rank_waits(tmp_path: Path) -> None:
    assert min(run_ranks(helped_by_a_thread, 2, tmp_path)) > 0


def test_a_collective_that_fails_leaves_torch_as_it_was() -> None:
    wait = dist.Work.wait
    timer = CollectiveTimer(torch.device("cpu"))
    with pytest.raises(RuntimeError), timer.time_collectives():
        raise RuntimeError
    assert dist.Work.wait is wait
    assert timer.waited_s == 0
