"""Sparse gradients, as nn.Embedding(sparse=True) gives them: clipped, summed, measured, and the state of their
optimiser."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from learnable import Learnable
from shoal.cost.step_profiler import profile_step
from shoal.parallel import ParallelSpec, World
from shoal.parallel.spmd.base import SingleProcessModel
from shoal.parallel.state import gradients
from shoal.parallel.state.gradients import sum_over_ranks

CPU = torch.device("cpu")


def test_sparse_gradients_are_clipped_as_dense_ones() -> None:
    rows, found = torch.tensor([1, 1, 4]), []  # one is used twice
    for sparse in (True, False):
        torch.manual_seed(0)
        table, linear = nn.Embedding(6, 3, sparse=sparse), nn.Linear(3, 2)
        linear(table(rows)).square().sum().backward()
        gradients.scale([table.weight], 3.0)
        norm = gradients.clip([table.weight, linear.weight], 0.5, CPU)
        found.append((norm, table.weight.grad.to_dense(), linear.weight.grad))
    torch.testing.assert_close(found[0], found[1])


def test_sparse_gradients_of_several_ranks_are_summed() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        table, group = nn.Embedding(6, 3, sparse=True), dist.group.WORLD
        assert group is not None
        table(torch.tensor([1, 1, 4])).sum().backward()
        sum_over_ranks([table.weight], group, factor=0.5)
    finally:
        dist.destroy_process_group()
    assert table.weight.grad.tolist() == [[number / 2] * 3 for number in (0, 2, 0, 0, 1, 0)]


class OfRows(nn.Module):
    """A table whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 2, sparse=True)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.table(rows.long())
        return found


def test_the_state_of_an_optimizer_of_sparse_gradients_can_be_asked_for_and_goes_over() -> None:
    def made() -> tuple[SingleProcessModel, torch.optim.Optimizer]:
        torch.manual_seed(0)
        parallel = SingleProcessModel(OfRows(), Learnable(), ParallelSpec(), World.single("cpu"), 5)
        return parallel, torch.optim.SparseAdam([each for _, each in parallel.named_parameters()], lr=0.1)

    first, optimizer = made()
    assert not first.optimizer_state(optimizer)["table.weight"]["state"]["exp_avg"].any()
    assert not optimizer.state  # as if it had not been asked
    first.train_step(torch.tensor([1, 2]), 0)
    optimizer.step()
    second, other = made()
    second.load_model_state(first.model_state())
    second.load_optimizer_state(other, first.optimizer_state(optimizer))
    for parallel, each in ((first, optimizer), (second, other)):
        parallel.train_step(torch.tensor([2, 4]), 1)
        each.step()
    torch.testing.assert_close(second.model_state(), first.model_state(), rtol=0.0, atol=0.0)


def test_the_memory_of_a_sparse_gradient_is_that_of_its_indices_and_values() -> None:
    parallel = SingleProcessModel(OfRows(), Learnable(), ParallelSpec(), World.single("cpu"), 5)
    optimizer = torch.optim.SparseAdam([each for _, each in parallel.named_parameters()], lr=0.1)
    for step in range(2):  # the first makes the optimiser's state
        with profile_step(parallel, optimizer) as profile:
            parallel.train_step(torch.tensor([1, 2, 2]), step)
            optimizer.step()
    num_rows = 3
    width = 2
    index_bytes = 8
    value_bytes = 4
    found = profile.values
    assert found["memory_gradients"] == num_rows * (index_bytes + width * value_bytes)
    assert found["memory_peak"] >= found["memory_parameters"] + found["memory_optimizer"] + found["memory_gradients"]
