"""Gradients end to end: the mean over ranks, dtypes, order in memory, who used them; sparse ones of nn.Embedding."""

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from learnable import Learnable
from programs import run_ranks
from shoal.cost.step_profiler import profile_step
from shoal.parallel import ParallelSpec, World
from shoal.parallel.comm.shm_all_reduce import ShmAllReduce
from shoal.parallel.spmd.base import SingleProcessModel
from shoal.parallel.spmd.ddp import FlatGradients, _broadcast_weights
from shoal.parallel.state import gradients
from shoal.parallel.state.gradients import sum_over_ranks

NUM_STEPS = 2


def parameters() -> list[nn.Parameter]:
    """One in rows, one in another order, one with gaps, one of another dtype; one that one rank uses, one that none."""
    return [
        nn.Parameter(torch.ones(2, 3)),
        nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.ones(4, 6)[:, ::2]),
        nn.Parameter(torch.ones(5, dtype=torch.bfloat16)),
        nn.Parameter(torch.ones(3)),
        nn.Parameter(torch.ones(3)),
    ]


def gradient(parameter: nn.Parameter, factor: float) -> Tensor:
    return torch.arange(parameter.numel(), dtype=parameter.dtype).view(parameter.shape) * factor


def averaged(
    world: World, may_skip: bool, has_rows: bool
) -> tuple[list[Tensor | None], list[bool], int, list[float], int]:
    """The program of a rank: gradients of the last step, of two micro-steps; whether each lies in memory as its
    parameter does, without gaps; how many bytes were sent for a step; the mean of the ranks' counts; and how often
    ranks have waited for each other in a step. A gradient is replaced by the user, with one of another memory format.

    has_rows: the memory that ranks share is large enough for all gradients
    """
    waits: list[bytes] = []
    group = dist.group.WORLD
    assert group is not None
    on_host = ShmAllReduce.try_create(group)
    assert on_host is not None
    if not has_rows:
        on_host.has_row_for = lambda _: False  # type: ignore[method-assign]
    sync_peers = on_host._sync_peers
    on_host._sync_peers = lambda message: (waits.append(message), sync_peers(message))[1]  # type: ignore[method-assign, func-returns-value]
    trainable = parameters()[: None if may_skip else 4]
    flat = FlatGradients(trainable, on_host)
    used = trainable[: 5 if world.rank == 0 else 4]
    for step in range(NUM_STEPS):
        for parameter in trainable:
            parameter.grad = None
        for micro_step in range(2):
            factor = 1.0 + world.rank + step + micro_step
            torch.stack([(gradient(each, factor) * each).float().sum() for each in used]).sum().backward()
        trainable[0].grad = trainable[0].grad.t().clone(memory_format=torch.contiguous_format).t()
        before_bytes, counts = on_host.sent_bytes, torch.tensor([1.0 + world.rank, 5.0])
        waits.clear()
        flat.average(may_skip, counts)
    alike = [each.grad is None or each.grad.stride() == torch.empty_like(each).stride() for each in trainable]
    grads = [None if each.grad is None else each.grad.clone() for each in trainable]
    return grads, alike, int(on_host.sent_bytes - before_bytes), counts.tolist(), len(waits)


def averaged_both_ways(world: World, may_skip: bool) -> list[Any]:
    return [averaged(world, may_skip, has_rows) for has_rows in (True, False)]


def test_each_gradient_is_the_mean_over_ranks() -> None:
    for grads, alike, sent_bytes, counts, num_waits in chain(*run_ranks(averaged_both_ways, 2, False)):
        for parameter, grad in zip(parameters(), grads, strict=False):
            # Ranks' factors in the last step, of both micro-steps: 2 + 3 and 3 + 4.
            torch.testing.assert_close(grad, gradient(parameter, 6.0))
        assert all(alike)
        assert sent_bytes == 4 * (6 + 120 + 12 + 2) + 2 * 5  # what a ring of two sends, once each way
        assert counts == [1.5, 5.0]
        assert num_waits == 2  # one for each dtype


def test_who_did_not_use_a_parameter_counts_as_zero() -> None:
    for grads, _, _, counts, num_waits in chain(*run_ranks(averaged_both_ways, 2, True)):
        assert (counts, num_waits) == ([1.5, 5.0], 2)
        torch.testing.assert_close(grads[0], gradient(parameters()[0], 6.0))
        torch.testing.assert_close(grads[4], gradient(parameters()[4], 2.5))
        assert grads[5] is None


DTYPES = (
    *(torch.bool, torch.uint8, torch.int16, torch.uint16, torch.int64, torch.float8_e4m3fn, torch.bfloat16),
    *(torch.float64, torch.complex64),
)


def begun(world: World) -> dict[str, Tensor]:
    """The program of a rank: what it begins with, of buffers of many types and a parameter in another order."""
    group = dist.group.WORLD
    assert group is not None
    model = nn.Module()
    model.table = nn.Parameter(torch.full((2, 3, 4, 5), float(world.rank)).to(memory_format=torch.channels_last))
    model.register_buffer("number", torch.tensor(world.rank))
    model.register_buffer("nothing", torch.empty(0))
    for dtype in DTYPES:
        model.register_buffer(f"of_{dtype}".replace(".", "_"), torch.full((3,), world.rank).to(dtype))
    _broadcast_weights(model, group)
    return {name: each.to(torch.complex64).abs() for name, each in model.state_dict().items()}


def test_replicas_begin_with_what_the_first_has_of_whatever_type() -> None:
    for found in run_ranks(begun, 2):
        assert len(found) == 3 + len(DTYPES)
        for name, tensor in found.items():
            assert not tensor.any(), name


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


def test_sparse_gradients_of_several_ranks_are_summed(group_of_one: dist.ProcessGroup) -> None:
    table = nn.Embedding(6, 3, sparse=True)
    table(torch.tensor([1, 1, 4])).sum().backward()
    sum_over_ranks([table.weight], group_of_one, factor=0.5)
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
