"""The training processes: this one's rank, its device, and the communication back end.

`World` is created once at the start of a process: alone, from torchrun's environment variables, or from an existing
group (Ray Train's). Called by the Trainer, which closes what it opened.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from shoal.errors import ConfigError, PlanError
from shoal.network_address import EXTERNAL_PROBE_HOST, find_local_address, is_loopback
from shoal.parallel.spec import Coordinates, ParallelDims

T = TypeVar("T")
CUDA_BACKEND = "cpu:gloo,cuda:nccl"
TIMEOUT_S = 300.0  # of a collective; a dead rank is detected much sooner, by its closed connection


@dataclass(frozen=True)
class World:
    """This process among its peers. torch.distributed is initialised if and only if `size` is above 1.

    local_rank: among the processes of this host, which is also the index of its device
    """

    rank: int
    size: int
    device: torch.device
    local_rank: int = 0
    _owns_group: bool = field(default=False, repr=False)

    @classmethod
    def single(cls, device: str = "auto") -> World:
        """One process, no group."""
        return cls(0, 1, choose_device(device, 0))

    @classmethod
    def from_environment(cls, device: str = "auto", backend: str | None = None) -> World:
        """From torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...); alone without them."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls.single(device)
        rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
        chosen = choose_device(device, local)
        has_others = int(os.environ.get("LOCAL_WORLD_SIZE", size)) < size
        set_network_interface_towards(os.environ.get("MASTER_ADDR", ""), has_others)
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=TIMEOUT_S)))
        # torchrun keeps its store over restarts, with the addresses of dead ranks.
        life = f"life-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        dist.init_process_group(
            backend or backend_for(chosen),
            store=dist.PrefixStore(life, store),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        return cls(rank, size, chosen, local, _owns_group=True)

    @classmethod
    def from_process_group(cls, device: str = "auto", local_rank: int = 0) -> World:
        """The existing group of this process; alone without one."""
        if not dist.is_initialized():
            return cls.single(device)
        return cls(dist.get_rank(), dist.get_world_size(), choose_device(device, local_rank), local_rank)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only one that writes."""
        return self.rank == 0

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank. Collective."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device if self.device.type == "cuda" else None)
        return box[0]

    def decide(self, find: Callable[[], T]) -> T:
        """What rank 0 finds, on every rank. Collective. Raises its PlanError, on every rank."""
        answer: T | PlanError | None = None
        if self.is_first:
            try:
                answer = find()
            except PlanError as error:
                answer = error
        answer = self.broadcast(answer)
        if isinstance(answer, PlanError):
            raise answer
        assert answer is not None
        return answer

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order of rank, on every rank. Collective."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def count_ranks_per_host(self) -> int:
        """Collective. Raises PlanError, on every rank, unless each host has as many ranks, which are neighbours."""
        local_ranks = self.gather(self.local_rank)
        number = max(local_ranks) + 1
        if self.size % number or local_ranks != [rank % number for rank in range(self.size)]:
            problem = f"hosts differ in their ranks, which are the host's {', '.join(map(str, local_ranks))}"
            raise PlanError("parallel.replicate", "hosts", problem, "give the number of copies, or equal hosts")
        return number

    def barrier(self) -> None:
        """Wait for every rank. Collective."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the group, if this created it. Idempotent."""
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()


def choose_device(device: str, index: int) -> torch.device:
    """The device of `auto`, `cpu` or `cuda`: `auto` is CUDA if this process sees a GPU.

    index: of the GPU, among those that this process sees. Raises ConfigError for `cuda` where it sees none.
    """
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device", device, "there is no CUDA device here", "use device=cpu, or auto")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def read_clock_s(device: torch.device) -> float:
    """The seconds of this process's clock once `device` has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def backend_for(device: torch.device) -> str:
    """The process group's back end for tensors on `device`; CPU tensors (objects, checkpoints) always have gloo."""
    return CUDA_BACKEND if device.type == "cuda" else "gloo"


GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"  # torch's; a value set by the user stays
NCCL_INTERFACE_VARIABLE = "NCCL_SOCKET_IFNAME"  # "=eth0": that one alone; "eth0" would be all that begin so


def set_network_interface(address: str) -> None:
    """Let groups that this process forms from now on use the interface with `address`, if there is one."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in (each.address.partition("%")[0] for each in addresses):
            chosen = os.environ.setdefault(GLOO_INTERFACE_VARIABLE, name)  # of both, also where a user has set it
            os.environ.setdefault(NCCL_INTERFACE_VARIABLE, f"={chosen}")
            return


def set_network_interface_towards(first_host: str, has_others: bool) -> None:
    """The same for the address that leads to `first_host`, if ranks are on other hosts: on the first host itself, whose
    own name leads to loopback, the outgoing address."""
    address = find_local_address(first_host)
    if address is not None and has_others and is_loopback(address):
        address = find_local_address(EXTERNAL_PROBE_HOST)
    if address is not None:
        set_network_interface(address)


def make_mesh(degrees: ParallelDims, world: World) -> DeviceMesh:
    """The ranks as [pipeline, replicate, shard, tensor]. Collective.

    Without `shard`, each of the `data` ranks is a copy.
    """
    copies = degrees.replicate if degrees.shard else degrees.data
    shape = (degrees.pipeline, copies, degrees.data // copies, degrees.tensor)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("pipeline", "replicate", "shard", "tensor"))


def make_data_group(degrees: ParallelDims, world: World) -> dist.ProcessGroup:
    """The ranks with the same part of the model as this one, and other samples. Collective."""
    if degrees.data == world.size:
        world_group = dist.group.WORLD
        assert world_group is not None
        return world_group
    firsts = [Coordinates(stage, 0, part) for stage in range(degrees.pipeline) for part in range(degrees.tensor)]
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration([degrees.peers(degrees.rank(first), "data") for first in firsts])
    return group
