"""Losses without `shoal.Mean` under random orders of labels, batches and splits: equal to the whole batch, or refused.

    python -m benchmarks.ours.random_splits FIRST LAST           # draws in micro-batches
    torchrun --nproc-per-node 2 -m benchmarks.ours.random_splits FIRST LAST     # by ddp, fsdp, pipelines of two ranks

Prints the verdicts, {verdict: number} by loss. Called by `benchmarks.unmarked_losses` and `tests/equivalence`.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.ours.hidden_losses import (
    IGNORED,
    LENGTH,
    LOSSES,
    NUM_CLASSES,
    OF_MODELS,
    Batch,
    make_inputs,
    make_network,
)
from benchmarks.talk import say
from shoal.errors import ConfigError, PlanError
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize
from shoal.train.loop.split_check import SplitCheck

NUM_STEPS = 5
TOLERANCE = 1e-5  # relative to a parameter's norm, in float32
PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"shard": True},
    {"data": 1, "pipeline": 2, "micro_batches": 2},
)  # of two ranks


@dataclass(frozen=True)
class Draw:
    """A random setting.

    labels:  of all batches, in the order of training
    density: the share of elements that count, in the first two batches and later
    plan:    as ParallelSpec takes it
    """

    labels: list[int]
    batch_size: int
    num_parts: int
    density: tuple[float, float] = (1.0, 1.0)
    plan: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, seed: int, num_ranks: int = 1) -> Draw:
        source = random.Random(seed)
        plan = {} if num_ranks == 1 else source.choice(PLANS)
        parts = source.choice([2, 3, 4, 8] if num_ranks == 1 else [2] if "pipeline" in plan else [1, 2])
        batch_size = num_ranks * parts * source.choice([1, 2, 4, 6])
        frequency = source.choice(
            [(1, 1, 1, 1, 0), (1, 1, 1, 1, 4), (50, 0, 0, 1, 0), (30, 10, 1, 1, 1), (40, 0, 0, 0, 1)]
        )
        labels = source.choices([0, 1, 2, 3, IGNORED], frequency, k=batch_size * NUM_STEPS)
        if source.random() < 0.5:
            labels.sort(reverse=source.random() < 0.5)
        density = source.choice([(1.0, 1.0), (1.0, 0.5), (0.9, 0.9), (0.3, 0.6)])
        return cls(labels, batch_size, parts, density, plan)

    def batches(self) -> list[Batch]:
        size, generator = len(self.labels), torch.Generator().manual_seed(len(self.labels))
        x, t = torch.randn(size, 6, generator=generator), torch.randn(size, NUM_CLASSES, generator=generator)
        y = torch.tensor(self.labels)
        density = torch.full((size, 1), self.density[1])
        density[: 2 * self.batch_size] = self.density[0]
        m = torch.rand(size, NUM_CLASSES, generator=generator) < density
        m[:, 0] |= ~m.any(1)
        w = torch.where(torch.rand(size, generator=generator) < density[:, 0], 1.0, 0.5) * (y != IGNORED)
        z = torch.randint(NUM_CLASSES, (size, LENGTH), generator=generator)
        z[torch.rand(size, LENGTH, generator=generator) >= density] = IGNORED
        every = Batch(x, y, t, m, torch.where(m, t, torch.nan), w, z)
        return [Batch(*each) for each in zip(*(each.split(self.batch_size) for each in every), strict=True)]


class SmallTask:
    """One of `LOSSES`, as what a plan needs of a Task."""

    def __init__(self, name: str) -> None:
        self.name = name

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return tuple(make_inputs(self.name, batch).values())

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return LOSSES[self.name](outputs, batch)

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Any]:
        return {}

    def tensor_plan(self) -> dict[str, str] | None:
        return None

    def pipeline_cuts(self) -> list[str] | None:
        return None


class ByName(nn.Module):
    """A network of transformers, whose arguments are given by position."""

    loss_function = None  # by which one knows those that compute their loss

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        return self.network(input_ids=tokens, labels=labels)


def train(world: World, name: str, draw: Draw, is_split: bool = True, is_checked: bool = True) -> list[Tensor]:
    """The weights after `NUM_STEPS`. Raises ConfigError where a loss is refused, and FloatingPointError for NaN."""
    torch.manual_seed(1)
    network = ByName(make_network(name)) if name in OF_MODELS else make_network(name)
    plan = draw.plan if "pipeline" in draw.plan else {**draw.plan, "accumulate": draw.num_parts}
    spec = ParallelSpec.parse(plan if is_split else {})
    dims = spec.resolve_dims(world.size)
    batches = draw.batches()
    size = draw.batch_size // dims.data
    rank = dims.coordinates(world.rank).data
    shares = [Batch(*(part[rank * size : (rank + 1) * size] for part in batch)) for batch in batches]
    model = parallelize(network, SmallTask(name), spec, dims, world, shares[0])
    check = SplitCheck(model, world, name, size // draw.num_parts) if is_split and is_checked else None
    optimizer = torch.optim.SGD([each for _, each in model.named_parameters()], 0.2)
    try:
        for step, batch in enumerate(shares):
            if check is not None:
                check.watch(batch)
            loss = model.train_step(batch, step)
            if check is not None:
                check.verify()
            if not all(world.gather(bool(loss.isfinite()))):
                raise FloatingPointError(f"step {step}")
            optimizer.step()
        weights = model.full_weights()
        return [weights[each] for each in sorted(weights)]
    finally:
        model.close()


def _compare(name: str, draw: Draw, world: World, is_checked: bool) -> str:
    try:
        found = train(world, name, draw, is_checked=is_checked)
    except FloatingPointError:
        found = []
    try:
        whole = train(World.single("cpu"), name, draw, is_split=False)
    except FloatingPointError:
        return "equal" if is_checked else "undecided"  # a batch without any label: its parts add nothing
    if not found:
        return "not finite" if world.is_first else "equal"
    least = 0.01 * max(float(each.norm()) for each in whole)  # of parameters that a network does not need
    pairs = zip(found, whole, strict=True)
    worst = max(float((one - other).norm() / other.norm().clamp(min=least)) for one, other in pairs)
    return "equal" if worst <= TOLERANCE else "wrong"


def judge(name: str, seed: int, world: World | None = None) -> str:
    """Of a random draw: `equal`; `refused`; `refused though right`; `not finite`, where the whole batch is; or `wrong`:
    trained without a word, and not as the whole batch is. Collective."""
    world = world or World.single("cpu")
    draw = Draw.make(seed, world.size)
    try:
        return _compare(name, draw, world, True)
    except PlanError:  # the first batch has no label, so that nothing shows where a pipeline may be cut
        return "refused though right"
    except ConfigError as error:
        if "Mean" not in str(error):
            raise
    return "refused though right" if _compare(name, draw, world, False) == "equal" else "refused"


def main(first: int, last: int) -> None:
    torch.set_num_threads(1)
    world = World.from_environment("cpu")
    names, verdicts = list(LOSSES), defaultdict[str, Counter[str]](Counter)
    for seed in range(first, last):
        name = names[seed % len(names)]
        if world.size > 1 and name in OF_MODELS:
            name = names[seed % 7]
        verdicts[name][judge(name, seed, world)] += 1
    if world.is_first:
        say(**{name: dict(each) for name, each in verdicts.items()})
    world.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
