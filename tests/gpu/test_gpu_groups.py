"""DDP and FSDP over NCCL, in a group of one rank; how long a step waits by the stream's clock; replicas on one
device."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_tasks import CLOSE, WORD, Net, assert_same_weights, make_spec, require_cuda
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shoal
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize
from shoal.parallel.comm.collective_timer import CollectiveTimer
from shoal.parallel.comm.world import backend_for
from shoal.parallel.spmd.base import SpmdModel
from shoal.parallel.spmd.ddp import DdpModel
from shoal.parallel.spmd.fsdp import FsdpModel
from shoal.train.launch.local import fit_locally
from shoal.train.reporting.result import TrainResult

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]
CYCLES = 100_000_000  # tens of milliseconds on any device
Make = Callable[[Net, ParallelSpec, World, Any], SpmdModel]


@pytest.fixture
def world(device: str) -> Iterator[World]:
    """Of a group with one rank, which `parallelize` would not need."""
    made = World.single(device)
    dist.init_process_group(backend_for(made.device), store=dist.HashStore(), rank=0, world_size=1)
    yield made
    dist.destroy_process_group()


def make_ddp(task: Net, spec: ParallelSpec, world: World, batch: Any) -> SpmdModel:
    assert dist.group.WORLD is not None
    return DdpModel(task.model(), task, spec, world, batch, 0, dist.group.WORLD)


def make_fsdp(task: Net, spec: ParallelSpec, world: World, batch: Any) -> SpmdModel:
    assert dist.group.WORLD is not None
    mesh = init_device_mesh(world.device.type, (1, 1), mesh_dim_names=("replicate", "shard"))
    return FsdpModel(task.model(), task, spec, world, 0, mesh, dist.group.WORLD)


def make_alone(task: Net, spec: ParallelSpec, world: World, batch: Any) -> SpmdModel:
    made = parallelize(task.model(), task, spec, spec.resolve_dims(1), world, batch)
    assert isinstance(made, SpmdModel)
    return made


def run(make: Make, kind: str, fields: dict[str, Any], world: World) -> tuple[SpmdModel, list[float]]:
    """Six clipped steps of SGD, and their losses."""
    task, spec = Net(kind), ParallelSpec.parse({"backend": backend_for(world.device), **fields})
    values, classes = (each.to(world.device) for each in task.data().train.tensors)  # type: ignore[union-attr]
    torch.manual_seed(0)
    model = make(task, spec, world, (values[:32], classes[:32]))
    optimizer = torch.optim.SGD([each for _, each in model.named_parameters()], 0.05, momentum=0.9)
    losses = []
    for step in range(6):
        part = slice(32 * (step % 4), 32 * (step % 4 + 1))
        losses.append(model.train_step((values[part], classes[part]), step))
        model.clip_gradients(0.5)
        optimizer.step()
    return model, [float(each) for each in losses]


@pytest.mark.parametrize("make", [make_ddp, make_fsdp])
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("mlp", {}),
        ("norm", {}),
        ("dropout", {}),
        ("wide", {"accumulate": 4}),
        ("wide", {"precision": "bf16"}),
        ("wide", {"precision": "fp16"}),
    ],
    ids=["plain", "batch_norm", "dropout", "accumulate", "bf16", "fp16"],
)
def test_a_rank_of_a_group_takes_the_steps_of_a_process_alone(
    make: Make, kind: str, fields: dict[str, Any], device: str, world: World
) -> None:
    if fields.get("precision") == "fp16":
        require_cuda(device)
    model, losses = run(make, kind, fields, world)
    alone, expected = run(make_alone, kind, fields, world)
    # The same kernels but for batch normalisation, whose sums are in another order; reduced types round each to 8 bits.
    tolerance = 1e-2 if "precision" in fields else 1e-4
    assert losses == pytest.approx(expected, rel=tolerance)
    theirs = alone.full_weights()
    for name, value in model.full_weights().items():
        torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance, msg=f"{name}: {{}}".format)
    if device == "cuda":
        torch.cuda.synchronize()
    assert math.isfinite(model.communication_s)
    assert model.communication_s > 0 or make is make_fsdp  # which may leave out collectives of one rank


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "bf16_params"},
        {"offload": "all"},
        {"offload": "all", "precision": "bf16_params", "activation_checkpointing": "block"},
        {"activation_checkpointing": "selective", "reshard_after_forward": True},
    ],
    ids=str,
)
def test_shards_that_save_memory_take_the_steps_of_a_process_alone(
    fields: dict[str, Any], device: str, world: World
) -> None:
    if "offload" in fields:
        require_cuda(device)
    model, losses = run(make_fsdp, "wide", fields, world)
    _, expected = run(make_alone, "wide", {}, world)
    assert losses == pytest.approx(expected, rel=2e-2 if "precision" in fields else 1e-4)
    kept = {each.to_local().device.type for _, each in model.named_parameters() if isinstance(each, DTensor)}
    assert kept == {"cpu" if "offload" in fields else device}


def test_a_stream_that_waits_is_timed_and_the_host_is_not(device: str) -> None:
    timer, other = CollectiveTimer(require_cuda(device)), torch.cuda.Stream()
    with timer.time_collectives():
        with torch.cuda.stream(other):
            torch.cuda._sleep(CYCLES)
            done = other.record_event()
        torch.cuda.current_stream().wait_event(done)
        torch.ones(8, device=device).sum()
    torch.cuda.synchronize()
    assert 0.005 < timer.waited_s < 5
    before = timer.waited_s
    torch.cuda._sleep(CYCLES)  # outside a step, or computed: not waited for
    torch.cuda.synchronize()
    assert timer.waited_s == before


class WaitInBackward(torch.autograd.Function):
    """Its backward pass lets the computation wait for another stream, as FSDP2's does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()) as _:
            torch.cuda._sleep(CYCLES)
            done = torch.cuda.current_stream().record_event()
        torch.cuda.current_stream().wait_event(done)
        return gradient * 2


def test_a_wait_of_the_backward_pass_is_timed(device: str) -> None:
    """On a device it runs on a thread of its own."""
    x = torch.ones(8, device=require_cuda(device), requires_grad=True)
    timer = CollectiveTimer(x.device)
    with timer.time_collectives():
        WaitInBackward.apply(x).sum().backward()
    torch.cuda.synchronize()
    assert 0.005 < timer.waited_s < 5


def test_torchrun_trains_on_the_device(device: str, shoal_home: Path) -> None:
    words = ["stop.steps=4", "batch_size=32", f"device={device}", "evaluate.every_steps=4", "threads=1"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    platform = str(Path(shoal.__file__).parents[1])
    ended = subprocess.run(
        [*launcher, "-m", "shoal.train", f"task={WORD}", *words],
        env={**os.environ, "PYTHONPATH": platform, "SHOAL_HOME": str(shoal_home)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "step 4" in ended.stdout or "4 steps" in ended.stdout, ended.stdout


# -- replicas that share the device: servers, rounds and sums are on the host, and the steps are the CPU's


SGD = {"name": "sgd", "learning_rate": 0.05}
KINDS: dict[str, dict[str, Any]] = {
    "parameter_server": {"sync": {"kind": "parameter_server", "servers": 2}, "workers": 2},
    "frames": {"sync": {"kind": "parameter_server", "transport": "frames"}, "workers": 2},
    "local_sgd": {"sync": {"kind": "local_sgd", "every": 2}, "workers": 2},
    "diloco": {"sync": {"kind": "diloco", "every": 2}, "workers": 2},
    "elastic": {"workers": [2, 2]},
}


def fit(device: str, **fields: Any) -> TrainResult:
    spec = make_spec(optimizer=SGD, stop={"steps": 4}, evaluate={"every_steps": 4}, device=device, **fields)
    return fit_locally(spec, registers=False)


@pytest.mark.parametrize("kind", KINDS)
def test_workers_on_one_device_take_the_steps_of_workers_on_the_cpu(kind: str, device: str) -> None:
    found = fit(device, **KINDS[kind])
    assert found.steps >= 4
    assert_same_weights(found, fit("cpu", **KINDS[kind]), **CLOSE)
