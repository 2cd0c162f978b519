"""Batch normalisation over data ranks, tried with one that stands for all of them."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
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


class Threads:
    """Two ranks that are threads of this process."""

    def __init__(self) -> None:
        self.barrier = Barrier(2, timeout=60)
        self.values: dict[int, Tensor] = {}

    def rank(self, index: int) -> Any:
        return ThreadRank(self, index)


class ThreadRank(OneRank):
    def __init__(self, threads: Threads, index: int) -> None:
        self.threads, self.index = threads, index

    def gather(self, mine: Tensor) -> Tensor:
        self.threads.values[self.index] = mine
        self.threads.barrier.wait()
        everyone = torch.stack([self.threads.values[index] for index in range(2)])
        self.threads.barrier.wait()
        return everyone

    def sum(self, values: Tensor) -> Tensor:
        return values.copy_(self.gather(values.clone()).sum(0))


def _penalize(model: nn.Module, inputs: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(model(inputs).pow(3).sum(), inputs, create_graph=True)
    return slope.square().sum()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)).double()


def test_a_gradient_penalty_is_that_of_the_whole_batch() -> None:
    """Two ranks with five and three samples, whose gradients are added; the oracle is torch's own layer with eight."""
    inputs = torch.randn(8, 3, dtype=torch.float64)
    whole = _model()
    threads = Threads()
    _penalize(whole, inputs.clone().requires_grad_()).backward()

    def differentiate(index: int) -> list[Tensor]:
        model = copy.deepcopy(whole)
        model.zero_grad()
        globalise_batch_norm(model, threads.rank(index))
        _penalize(model, inputs.split([5, 3])[index].clone().requires_grad_()).backward()
        return [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(differentiate, range(2))
    for mine, theirs, parameter in zip(one, other, whole.parameters(), strict=True):
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(mine + theirs, expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in forward mode
@pytest.mark.parametrize("ranks", [None, OneRank()], ids=["alone", "one rank"])
def test_it_is_differentiated_any_number_of_times(ranks: Any) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3)).double()
    globalise_batch_norm(model, ranks)
    inputs = torch.randn(5, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model, inputs, check_batched_grad=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(model, inputs, check_batched_grad=True)
    (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    assert slope.requires_grad, "of a loss that is linear in the outputs, too"


def test_transforms_see_each_operation() -> None:
    inputs = torch.randn(4, 5, 3)
    mine, theirs = _globalised(layer := nn.BatchNorm1d(3, track_running_stats=False)), copy.deepcopy(layer)
    theirs.__class__ = nn.BatchNorm1d

    def differentiate(model: nn.Module) -> Tensor:
        found: Tensor = torch.vmap(torch.func.grad(lambda inputs: model(inputs).pow(3).sum()))(inputs)
        return found

    torch.testing.assert_close(differentiate(mine), differentiate(theirs))
