"""Ranks on hosts with disks of their own: checkpoints by a store, and the probe that refuses a run without one."""

import os
import re
import shutil
import socket
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from bucket_server import BUCKET, bucket_environment
from failures import down
from programs import run_ranks
from shoal.checkpoint import Checkpointer
from shoal.errors import CheckpointError, ConfigError
from shoal.parallel import World
from shoal.store import Store, open_store

__all__ = ["bucket_environment"]

SIZE, PER_HOST = 4, 2
TIMEOUT_S = 120.0
VALUES = torch.arange(40.0).reshape(10, 4)


def host_of(rank: int) -> str:
    return f"host{rank // PER_HOST}"


def state_of(scale: float, *, rows: bool = True) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (SIZE,))
    return {"weight": distribute_tensor(scale * VALUES, mesh, [Shard(0) if rows else Replicate()])}


def open_here(world: World, folder: Path, store: Store | None) -> Checkpointer:
    """On the host of this rank."""
    return Checkpointer(folder / host_of(world.rank), keep=2, store=store)


def load_newest(checkpointer: Checkpointer, *, rows: bool) -> tuple[int, float]:
    """The step, and the scale of its values."""
    found = checkpointer.latest()
    assert found is not None
    state = state_of(0, rows=rows)
    checkpointer.load(found, state)
    values = state["weight"].full_tensor()
    assert torch.equal(values, values[0, 1] * VALUES)
    return found.step, float(values[0, 1])


def probe(world: World, folder: Path) -> list[str]:
    found = []
    for store in (None, open_store(folder / host_of(world.rank) / "store")):
        with open_here(world, folder, store) as checkpointer, pytest.raises(ConfigError) as caught:
            checkpointer.require_durable()
        found.append(str(caught.value))
    for store in (None, open_store(folder / "store")):  # one folder, or one store
        here = folder if store is None else folder / host_of(world.rank)
        with Checkpointer(here, store=store) as checkpointer:
            checkpointer.require_durable()
    return found


def save_and_lose_hosts(world: World, folder: Path, url: str) -> None:
    store, own = open_store(url), folder / host_of(world.rank)
    with open_here(world, folder, store) as checkpointer:
        checkpointer.require_durable()
        assert checkpointer.latest() is None
        for step in (1, 2, 3):
            (own / ".draft-old").mkdir(exist_ok=True)
            dist.barrier()
            checkpointer.save(step, state_of(step), best=step == 1)
            checkpointer.finish_uploads(TIMEOUT_S)
        assert {path.name for path in own.iterdir()} - {"best.json", "step-000000001"} == {
            "step-000000002", "step-000000003",
        }  # fmt: skip
        assert load_newest(checkpointer, rows=True) == (3, 3.0)
        names = sorted(path.name for path in (own / "step-000000003").glob("shard-*"))
        ranks = range(PER_HOST * (world.rank // PER_HOST), PER_HOST * (world.rank // PER_HOST + 1))
        assert names == [f"shard-{rank:05d}-of-00004.safetensors" for rank in ranks]  # no other was needed
        assert load_newest(checkpointer, rows=False) == (3, 3.0)  # now all of them are
    dist.barrier()
    if world.rank % PER_HOST == 0:
        shutil.rmtree(own)
    dist.barrier()
    with open_here(world, folder, store) as checkpointer:
        assert load_newest(checkpointer, rows=True) == (3, 3.0)
        found = checkpointer.best()
        assert found.step == 1


def fail_on_one_rank(world: World, folder: Path) -> None:
    store = open_store(folder / "other-store")
    with Checkpointer(folder / f"own{world.rank}", store=store) as checkpointer:
        checkpointer.save(1, state_of(1))
        checkpointer.finish_uploads(TIMEOUT_S)
        with down(store) if world.rank == 2 else nullcontext():
            checkpointer.save(2, state_of(2))
            with pytest.raises(CheckpointError, match=r"of step 2 are not in .*the store is down"):
                checkpointer.finish_uploads(TIMEOUT_S)
            assert load_newest(checkpointer, rows=True) == (1, 1.0)
        checkpointer.save(3, state_of(3))
        checkpointer.finish_uploads(TIMEOUT_S)
        assert load_newest(checkpointer, rows=True) == (3, 3.0)


def play_all(world: World, folder: Path, environment: dict[str, str]) -> list[str]:
    torch.set_num_threads(1)
    os.environ.update(environment)
    socket.gethostname = lambda: host_of(world.rank)
    refused = probe(world, folder / "probe")
    save_and_lose_hosts(world, folder / "bucket", f"s3://{BUCKET}/{folder.name}")
    fail_on_one_rank(world, folder / "failing")
    return refused


def test_four_ranks_on_two_hosts_with_disks_of_their_own(tmp_path: Path, bucket_environment: dict[str, str]) -> None:
    for without, own_store in run_ranks(play_all, SIZE, tmp_path, bucket_environment):
        assert "SHOAL_HOME = " in without
        assert re.search(r"the hosts host1 \(/\S+\).* and host0 \(/\S+\) have no folder in common there", without)
        assert "set SHOAL_STORE to a bucket" in without
        assert "host1 does not see there what the first rank has written" in own_store
