"""Batch normalisation over data ranks, tried with one that stands for all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.parallel.layers.batch_norm import globalise_batch_norm


class OneRank:
    """Nobody else has anything to say."""

    def gather(self, mine: Tensor) -> Tensor:
        return mine[None]

    def sum(self, values: Tensor) -> Tensor:
        return values


class TwoRanks(OneRank):
    """The other one has what this one has."""

    num_asked = 0

    def gather(self, mine: Tensor) -> Tensor:
        self.num_asked += 1
        return torch.stack([mine, mine])


class Frozen(nn.BatchNorm1d):
    """Keeps what it has learnt, whatever the mode of the model."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def _globalised(layer: nn.Module) -> nn.Module:
    ranks: Any = OneRank()
    model = nn.Sequential(layer)
    globalise_batch_norm(model, ranks)
    return model


@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"affine": False}, {"momentum": None}])
def test_it_computes_what_torch_does(settings: dict[str, Any]) -> None:
    theirs, mine = nn.BatchNorm1d(3, **settings), nn.BatchNorm1d(3, **settings)
    expected, found = _gradient(theirs), _gradient(_globalised(mine))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict())


def test_alone_it_tries_one_sample_and_afterwards_it_speaks_with_the_others() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    globalise_batch_norm(model, None)
    model(torch.ones(1, 3)).sum().backward()
    assert not model[0].weight.grad.any()  # type: ignore[union-attr]
    assert all(buffer.isfinite().all() for buffer in model.buffers())
    ranks: Any = TwoRanks()
    globalise_batch_norm(model, ranks)
    model(torch.ones(1, 3))
    assert ranks.num_asked == 1


def _gradient(model: nn.Module) -> Tensor:
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (model(inputs).square() * torch.arange(15.0).view(5, 3)).sum().backward()
    assert inputs.grad is not None
    return inputs.grad


def test_a_layer_stays_what_it_was() -> None:
    layer = Frozen(3)
    model = _globalised(layer)
    model.train()
    assert isinstance(layer, Frozen)
    assert not layer.training
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        model(torch.zeros(2, 3, 4, 4))


def test_a_second_derivative_is_refused() -> None:
    """The first has sums over all ranks in it, through which nothing is differentiated."""
    inputs = torch.randn(5, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(_globalised(nn.BatchNorm1d(3))(inputs).pow(3).sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()
