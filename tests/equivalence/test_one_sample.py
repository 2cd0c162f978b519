"""A share of one sample: batch normalisation has the statistics of all data ranks, and no rank needs its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import SEED, whole_gradients
from pipeline_cases import Learnable
from torch import Tensor, nn

from programs import run_ranks
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize

PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"data": 4},
    "fsdp": {"data": 4, "shard": True},
    "pipeline": {"data": 2, "pipeline": 2, "micro_batches": 2},
}


class Cut(Learnable):
    cuts: list[str] | None = ["3"]  # noqa: RUF012


def _batch() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 6, generator=generator), torch.tensor([0, 1, 2, 0])]


def _stepped(world: World, plan: dict[str, Any], batch: list[Tensor]) -> dict[str, dict[str, Tensor | None]]:
    """The gradients and the buffers after a step."""
    torch.manual_seed(0)
    norms = nn.BatchNorm1d(8, eps=1.0), nn.BatchNorm1d(3, eps=1.0)  # of two samples, a small eps leaves but their signs
    model = nn.Sequential(nn.Linear(6, 8), norms[0], nn.Tanh(), nn.Linear(8, 3), norms[1])
    spec = ParallelSpec.parse(plan)
    degrees = spec.resolve_dims(world.size)
    at, each = degrees.coordinates(world.rank).data, len(batch[0]) // degrees.data
    share = tuple(tensor[at * each : (at + 1) * each] for tensor in batch)
    parallel = parallelize(model, Cut(), spec, degrees, world, share, SEED)
    parallel.train_step(share, 0)
    buffers = {name: value for name, value in parallel.model_state().items() if "running" in name or "num" in name}
    found = {"gradients": whole_gradients(parallel.named_parameters()), "buffers": buffers}
    parallel.close()
    return found


def _all_plans(world: World) -> dict[str, Any]:
    return {name: _stepped(world, plan, _batch()) for name, plan in PLANS.items()}


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    return run_ranks(_all_plans, 4)


@pytest.mark.parametrize("plan", PLANS)
def test_one_sample_a_rank_is_trained_as_in_one_process(four_ranks: list[dict[str, Any]], plan: str) -> None:
    """Tolerance 1e-5: fp32 sums over four samples, in another order."""
    is_parted = plan == "pipeline"  # in two, which micro-batches are
    expected = _stepped(World.single("cpu"), {"accumulate": 2 if is_parted else 1}, _batch())
    for rank in four_ranks:
        for kind, values in rank[plan].items():
            assert values
            assert is_parted or values.keys() == expected[kind].keys()
            for name, value in values.items():
                torch.testing.assert_close(value, expected[kind][name], rtol=1e-5, atol=1e-5)
