"""What is predicted for a plan in one process, beside what two real ranks of it measure."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from programs import run_ranks
from shoal.cost import step_profiler
from shoal.cost.measure.memory import measure_growth
from shoal.cost.measure.op_counter import count_ops
from shoal.cost.step_profiler import StepProfiler
from shoal.data import Data
from shoal.data.loader import load_first_batch
from shoal.libs.planning.predict.predict import predict_cost
from shoal.parallel import World
from shoal.parallel.build import parallelize
from shoal.train import Task, TrainSpec
from shoal.train.optim.optimizers import make_optimizer

PLANS = {"fsdp": ["parallel=fsdp"]}
MORE = {
    "pipeline": ["parallel=pipeline"],
    "ddp, accumulating, clipped": ["parallel=ddp", "parallel.accumulate=2", "clip_norm=1.0"],
    "tensor": ["parallel=tensor"],
    "ddp, whose ranks share statistics in the forward pass": ["parallel=ddp", "args.normalises=true"],
    "fsdp, recomputing layers that stay gathered": [
        *("parallel=fsdp", "parallel.activation_checkpointing=block", "parallel.reshard_after_forward=false"),
        *("args.depth=3", "optimizer.name=adamw_8bit"),
    ],
    "fsdp in bf16, recomputing parts of layers": [
        *("parallel=fsdp", "parallel.precision=bf16_params", "parallel.activation_checkpointing=selective"),
        *("args.depth=3", "clip_norm=1.0"),
    ],
    "interleaved": ["parallel=pipeline", "parallel.schedule=interleaved_1f1b", "args.cuts=[conv2, flat, middle]"],
}
OF_FOUR = {
    "sharded stages": ["parallel={data: 2, shard: true, pipeline: 2}"],
    "split stages": ["parallel={data: 1, tensor: 2, pipeline: 2}"],
}
WITHIN = 0.1


class Net(nn.Module):
    """Convolutions, which have scratch memory, and linear layers, which can be split."""

    def __init__(self, normalises: bool = False) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.norm = nn.BatchNorm2d(8) if normalises else nn.Identity()
        self.flat, self.first = nn.Flatten(), nn.Linear(8 * 12 * 12, 64)
        self.middle, self.last = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(self.flat(self.norm(self.conv2(self.conv1(images).relu())).relu())).relu()
        result: Tensor = self.last(self.middle(hidden).relu())
        return result


class Layer(nn.Module):
    """A residual layer, most of whose activations can be computed again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        added: Tensor = hidden + self.drop(self.down(nn.functional.gelu(self.up(self.norm(hidden)))))
        return added


class Pictures(Task):
    """depth: the number of residual layers; 0 for the network of convolutions"""

    def __init__(self, *, cuts: tuple[str, ...] = ("flat",), normalises: bool = False, depth: int = 0) -> None:
        self.cuts = cuts
        self.normalises = normalises
        self.depth = depth

    def model(self) -> nn.Module:
        if self.depth:
            layers = [Layer(64) for _ in range(self.depth)]
            return nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.Sequential(*layers), nn.Linear(64, 10))
        return Net(self.normalises)

    def data(self) -> Data:
        return Data(TensorDataset(torch.randn(32, 1, 16, 16), torch.randint(0, 10, (32,))))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def pipeline_cuts(self) -> list[str]:
        return list(self.cuts)


def spec_of(words: list[str], workers: int) -> TrainSpec:
    return TrainSpec(batch_size=32, workers=workers).override(words)


def measured(world: World, plans: dict[str, list[str]]) -> list[dict[str, float]]:
    """A probe's numbers for each plan, one after the other."""
    step_profiler.MIN_TIMED_S = 0.0  # in this process, which ends: times are not compared
    return [_measured(world, spec_of(words, world.size)) for words in plans.values()]


def _measured(world: World, spec: TrainSpec) -> dict[str, float]:
    task, degrees = Pictures(**spec.args), spec.resolve_dims()
    torch.manual_seed(spec.seed)
    batch = load_first_batch(task.data(), spec.batch_size // degrees.data, world.device)
    model = parallelize(task.model(), task, spec.parallel, degrees, world, batch, spec.seed)
    optimizer = make_optimizer(task, spec.optimizer, [parameter for _, parameter in model.named_parameters()])
    probe, step = StepProfiler(model, optimizer, world), 0
    while not probe.is_due:
        with probe.step():
            model.train_step(batch, step)
            if spec.clip_norm is not None:
                model.clip_gradients(spec.clip_norm)
            optimizer.step()
        model.on_optimizer_step()
        step += 1
    found = probe.collect_table().values
    model.close()
    return found


def peaks_of_collectives(world: World, num: int, size: int) -> list[float]:
    """The most at once, in tensors of `size`, while one result after the other is received and dropped."""
    values = torch.ones(size)

    def summed() -> None:
        functional.all_reduce(values, "sum", dist.group.WORLD).sum()

    def gathered() -> None:
        functional.all_gather_single(values, 0, dist.group.WORLD).sum()

    def gathered_into() -> None:
        dist.all_gather_single(torch.empty(2 * size), values, async_op=True).wait()

    def scattered() -> None:
        dist.reduce_scatter_single(torch.empty(size // 2), values.clone(), async_op=True).wait()

    found = []
    for each in (summed, gathered, gathered_into, scattered):
        with measure_growth(world.device) as grown, count_ops(grown):
            for _ in range(num):
                each()
        found.append(grown.peak_bytes / values.nbytes)
    return found


@pytest.mark.soak
def test_what_gloo_holds_a_moment_longer_is_not_counted() -> None:
    num, size = 100, 2**16
    own = [1, 2 + 2, 2 + 2, 0.5 + 1 + 1]  # the result, and what gloo makes while it carries it
    for peaks in run_ranks(peaks_of_collectives, 2, num, size):
        assert peaks == pytest.approx(own, rel=0.01)


@pytest.mark.parametrize(
    ("plans", "size"),
    [
        ({"alone": []}, 1),
        (PLANS, 2),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in ((MORE, 2), (OF_FOUR, 4))),
    ],
    ids=["one", "two", "more", "four"],
)
def test_ranks_take_what_was_predicted_for_them(plans: dict[str, list[str]], size: int) -> None:
    found = run_ranks(measured, size, plans)
    assert all(each == found[0] for each in found)  # every rank knows of all
    for (name, words), real in zip(plans.items(), found[0], strict=True):
        spec = spec_of(words, size)
        predicted = predict_cost(Pictures(**spec.args), spec)
        for quantity in ("flops_step", "flops_rank", "memory_parameters", "memory_gradients", "memory_optimizer"):
            assert predicted[quantity] == real[quantity], f"{name}: {quantity}"
        assert predicted["sent_bytes"] == pytest.approx(real["sent_bytes"], rel=0.01), name
        for quantity in ("memory_peak", "memory_activations"):
            assert predicted[quantity] == pytest.approx(real[quantity], rel=WITHIN), f"{name}: {quantity}"
        assert ("bubble" in real) == (spec.resolve_dims().pipeline > 1)
