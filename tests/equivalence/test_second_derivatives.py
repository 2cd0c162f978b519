"""A gradient penalty in a Task's loss under a plan: that of one process, or an error that says which plan has it."""

from typing import Any

import pytest
import torch
from cases import SEED, whole_gradients
from torch import Tensor, nn

from learnable import Classifier
from programs import run_ranks
from shoal.errors import PlanError
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize


class Penalized(Classifier):
    def inputs(self, batch: Any) -> tuple[Any, ...]:
        self.x = batch[0].clone().requires_grad_()
        return (self.x,)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        (slope,) = torch.autograd.grad(outputs.sum(), self.x, create_graph=True)
        return super().loss(outputs, batch) + slope.square().sum(1).mean()


def _gradients(world: World, plan: dict[str, Any]) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    batch = torch.randn(8, 6, generator=generator), torch.arange(8) % 3
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    spec = ParallelSpec.parse(plan)
    dims = spec.resolve_dims(world.size)
    share = batch[0].double().chunk(dims.data)[world.rank], batch[1].chunk(dims.data)[world.rank]
    parallel = parallelize(model, Penalized(), spec, dims, world, share, SEED)
    try:
        parallel.train_step(share, 0)
        return whole_gradients(parallel.named_parameters())
    finally:
        parallel.close()


def _all_plans(world: World) -> tuple[dict[str, Tensor | None], str]:
    found = _gradients(world, {"data": 2})
    with pytest.raises(PlanError) as caught:
        _gradients(world, {"data": 2, "shard": True})
    return found, str(caught.value)


def test_a_gradient_penalty_on_two_ranks() -> None:
    """With statistics of both in the first derivatives, and so sums over both in the second."""
    expected = _gradients(World.single("cpu"), {})
    for found, error in run_ranks(_all_plans, 2):
        torch.testing.assert_close(found, expected)
        assert "a second derivative (create_graph=True) needs weights that are freed after the first" in error
        assert "parallel=ddp" in error
