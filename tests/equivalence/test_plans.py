"""Every plan gives one process's gradients, losses and weights, on the same global batches."""

from __future__ import annotations

from typing import Any

from cases import LENGTH, MODELS, VOCABULARY, assert_equal, trained
from torch import Tensor, nn

from programs import run_ranks
from shoal.parallel import ParallelSpec, World

# fp32 sums are taken in another order: a few units in the last place, amplified by three steps of Adam.
FP32 = {"rtol": 2e-4, "atol": 2e-5}
# bf16 has eight bits: an input that another order of sums rounds to its neighbour moves what follows by 2**-8.
BF16 = {"rtol": 5e-2, "atol": 2e-2}


def _all(world: World, plans: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [trained(name, ParallelSpec.parse(plan), world) for name, plan in plans]


def _compare(size: int, plans: list[dict[str, Any]], models: list[str]) -> None:
    cases = [(name, plan) for name in models for plan in plans]
    ranks = run_ranks(_all, size, cases)
    for index, (name, plan) in enumerate(cases):
        alone = {key: plan[key] for key in ("accumulate", "precision") if key in plan}
        expected = trained(name, ParallelSpec.parse(alone), World.single("cpu"))
        for rank in range(size):
            assert_equal(ranks[rank][index], expected, **(BF16 if "precision" in plan else FP32))


def test_two_ranks() -> None:
    tensor = {"data": 1, "tensor": 2}
    plans: list[dict[str, Any]] = [{}, {"shard": True}, tensor]
    _compare(2, plans + [{**plan, "accumulate": 2} for plan in plans], list(MODELS))


class Between(nn.Module):
    """What stands between some of the layers learns too; a rank that held a part of them would see a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.slopes = nn.Sequential(nn.Linear(8 * LENGTH, 16), nn.PReLU(), nn.Linear(16, 8))
        self.split = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.split(self.slopes(self.embedding(tokens).flatten(1)).relu())
        return output


class InPlace(nn.Module):
    """What the layers give is changed in place: an embedding's, and those of layers split by columns and by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens).mul_(2.0)
        hidden = self.layers(embedded)
        hidden += embedded
        output: Tensor = self.head(hidden).mul_(0.5)
        return output.mean(1)


def _in_place(world: World) -> list[dict[str, Any]]:
    plans = [{"data": 1, "tensor": 2}, {"data": 1, "tensor": 2, "accumulate": 2}]
    return [trained(InPlace, ParallelSpec.parse(plan), world) for plan in plans]


def test_what_split_layers_give_may_be_changed_in_place() -> None:
    ranks = run_ranks(_in_place, 2)
    for index, accumulate in enumerate((1, 2)):
        expected = trained(InPlace, ParallelSpec(accumulate=accumulate), World.single("cpu"))
        for found in ranks:
            assert_equal(found[index], expected, **FP32)


def _between(world: World) -> dict[str, Any]:
    return trained(Between, ParallelSpec.parse({"data": 1, "tensor": world.size}), world)


def test_what_learns_between_two_layers_learns_as_in_one_process() -> None:
    expected = trained(Between, ParallelSpec(), World.single("cpu"))
    for found in run_ranks(_between, 2):
        assert_equal(found, expected, **FP32)


def test_two_ranks_in_bf16() -> None:
    plans: list[dict[str, Any]] = [{}, {"shard": True}, {"data": 1, "tensor": 2}]
    _compare(2, [{**plan, "precision": "bf16"} for plan in plans], ["transformer"])


def test_four_ranks() -> None:
    _compare(4, [{"shard": True, "replicate": 2}, {"shard": True, "tensor": 2}, {"tensor": 2}], list(MODELS))
