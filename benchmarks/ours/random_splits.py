"""Losses without `shoal.Mean` under random orders of labels, batches and splits: equal to the whole batch, or refused.

Called by `benchmarks.unmarked_losses` and `tests/equivalence`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal.errors import ConfigError
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize
from shoal.train.loop.split_check import SplitLossCheck

NUM_CLASSES, NUM_STEPS, IGNORED = 4, 5, -100
WEIGHTS = torch.tensor([1.0, 1.0, 3.0, 20.0])
TOLERANCE = 1e-5  # relative to a parameter's norm, in float32


def masked_mean(outputs: Tensor, labels: Tensor) -> Tensor:
    each, is_labelled = functional.cross_entropy(outputs, labels, reduction="none"), labels != IGNORED
    return (each * is_labelled).sum() / is_labelled.sum()


def mean_of_selected(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, labels, reduction="none")[labels != IGNORED].mean()


def with_penalty(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, labels) + 0.1 * outputs.square().mean()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "class weights": partial(functional.cross_entropy, weight=WEIGHTS),
    "ignored labels": nn.CrossEntropyLoss(),
    "half of a weighted likelihood": lambda outputs, labels: 0.5 * nn.NLLLoss(WEIGHTS)(outputs.log_softmax(-1), labels),
    "a masked mean by hand": masked_mean,
    "a mean of the selected": mean_of_selected,
    "with a penalty": with_penalty,
}


@dataclass(frozen=True)
class Draw:
    """A random setting. `labels`: of all batches, in the order of training."""

    labels: list[int]
    batch_size: int
    num_parts: int

    @classmethod
    def make(cls, seed: int, num_ranks: int = 1) -> Draw:
        source = random.Random(seed)
        parts = source.choice([2, 3, 4, 8] if num_ranks == 1 else [1, 2])
        batch_size = num_ranks * parts * source.choice([1, 2, 4, 6])
        frequency = source.choice(
            [(1, 1, 1, 1, 0), (1, 1, 1, 1, 4), (50, 0, 0, 1, 0), (30, 10, 1, 1, 1), (40, 0, 0, 0, 1)]
        )
        labels = source.choices([0, 1, 2, 3, IGNORED], frequency, k=batch_size * NUM_STEPS)
        if source.random() < 0.5:
            labels.sort(reverse=source.random() < 0.5)
        return cls(labels, batch_size, parts)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        x = torch.randn(len(self.labels), 6, generator=torch.Generator().manual_seed(len(self.labels)))
        split = (each.split(self.batch_size) for each in (x, torch.tensor(self.labels)))
        return list(zip(*split, strict=True))


class SmallTask:
    """One of `LOSSES`, as what a plan needs of a Task."""

    def __init__(self, name: str) -> None:
        self._loss = LOSSES[name]

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return (batch[0],)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return self._loss(outputs, batch[1])

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Any]:
        return {}

    def tensor_plan(self) -> dict[str, str] | None:
        return None

    def pipeline_cuts(self) -> list[str] | None:
        return None


def train(world: World, name: str, draw: Draw, num_parts: int) -> list[Tensor]:
    """The weights after `NUM_STEPS`. Raises ConfigError where a loss is refused, and FloatingPointError for NaN."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, NUM_CLASSES))
    spec = ParallelSpec.parse({"accumulate": num_parts})
    size = draw.batch_size // world.size
    share = slice(world.rank * size, (world.rank + 1) * size)
    batches = [(x[share], y[share]) for x, y in draw.batches()]
    model = parallelize(network, SmallTask(name), spec, spec.resolve_dims(world.size), world, batches[0])
    check = SplitLossCheck(model, world, name, num_parts) if num_parts * world.size > 1 else None
    optimizer = torch.optim.SGD([each for _, each in model.named_parameters()], 0.2)
    try:
        for step, batch in enumerate(batches):
            if check is not None:
                check.before_step(batch)
            loss = model.train_step(batch, step)
            if not loss.isfinite():
                raise FloatingPointError(f"step {step}")
            optimizer.step()
        return [each.detach().clone() for _, each in model.named_parameters()]
    finally:
        model.close()


def judge(name: str, draw: Draw, split: Callable[[], list[Tensor]]) -> str:
    """`equal`, `refused`, `not finite`, or `wrong`: trained without a word, and not as the whole batch is."""
    try:
        found = split()
    except ConfigError:
        return "refused"
    except FloatingPointError:
        return "not finite"
    try:
        whole = train(World.single("cpu"), name, draw, 1)
    except FloatingPointError:
        return "equal"  # a batch without any label: its parts add nothing
    worst = max(float((one - other).norm() / other.norm()) for one, other in zip(found, whole, strict=True))
    return "equal" if worst <= TOLERANCE else "wrong"


def judge_micro_batches(name: str, seed: int) -> str:
    draw = Draw.make(seed)
    return judge(name, draw, lambda: train(World.single("cpu"), name, draw, draw.num_parts))
