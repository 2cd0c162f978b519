"""Every plan gives one process's gradients, losses and weights, on the same global batches."""

from __future__ import annotations

from typing import Any

from cases import MODELS, assert_equal, trained

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
        expected = trained(name, ParallelSpec.parse(alone), World.alone("cpu"))
        for rank in range(size):
            assert_equal(ranks[rank][index], expected, **(BF16 if "precision" in plan else FP32))


def test_two_ranks() -> None:
    tensor = {"data": 1, "tensor": 2}
    plans: list[dict[str, Any]] = [{}, {"shard": True}, tensor]
    _compare(2, plans + [{**plan, "accumulate": 2} for plan in plans], list(MODELS))


def test_two_ranks_in_bf16() -> None:
    plans: list[dict[str, Any]] = [{}, {"shard": True}, {"data": 1, "tensor": 2}]
    _compare(2, [{**plan, "precision": "bf16"} for plan in plans], ["transformer"])


def test_four_ranks() -> None:
    _compare(4, [{"shard": True, "replicate": 2}, {"shard": True, "tensor": 2}, {"tensor": 2}], list(MODELS))
