"""Long chains, wide nodes and large levels, as the recursion by the equations; chains padded in groups by their length.

Chains of 1,100 nodes, which Python does not recurse over, nodes with 500 children and levels of 2,100 nodes. Padded
chains are computed as torch's LSTM computes each alone, and with little padding.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from tree_recursion import (
    SUBJECTS,
    Subject,
    SumCell,
    assert_equals_recursion,
    chain,
    children_of,
    float64_on_one_thread,
    star,
)

from shoal.libs.trees import ChildSumLSTMCell, TreeBatch, TreeRNN


@pytest.fixture(autouse=True)
def _use_float64() -> Iterator[None]:
    with float64_on_one_thread():
        yield


@pytest.mark.parametrize("subject", [SUBJECTS[name] for name in ("child-sum", "n-ary")])
def test_a_chain_of_1100_nodes(subject: Subject) -> None:
    parents = [chain(1100)]
    assert_equals_recursion(
        subject.make(2), TreeBatch.from_parents(parents), list(map(children_of, parents)), subject.size, subject.ways
    )


@pytest.mark.parametrize("name", ["child-sum", "n-ary", "recursive", "sum", "gated"])
def test_a_node_with_500_children(name: str) -> None:
    subject = SUBJECTS[name]
    parents = [star(500), [2, 2, -1]]
    assert_equals_recursion(
        subject.make(500), TreeBatch.from_parents(parents), list(map(children_of, parents)), subject.size, subject.ways
    )


def test_a_level_of_more_nodes_than_one_call_takes() -> None:
    """Chains of two on one root: 2,100 leaves and 2,100 nodes above them, whose gradients are added up in pieces."""
    parents = [[-1] + [0] * 2100 + list(range(1, 2101))]
    cell = SumCell(1)
    with torch.no_grad():
        cell.below.weight.mul_(0.01)
    assert_equals_recursion(cell, TreeBatch.from_parents(parents), list(map(children_of, parents)), 1, ["levels"])


SIZES = [[3, 9, 1, 1, 9, 2, 17, 8], [4, 3], [1, 2, 4, 8, 16, 31], [40, 1, 1, 1, 1, 2, 2, 9, 9]]


def chains(sizes: list[int]) -> list[list[int]]:
    """Node 0 is the root; the last one is the leaf, the first step."""
    return [list(range(-1, size - 1)) for size in sizes]


def outputs_of_each(cell: ChildSumLSTMCell, x: Tensor, sizes: list[int]) -> Tensor:
    """By `nn.LSTMCell`, chain by chain: [N, H], nodes as they came."""
    f, i, o, u = range(4)
    one = nn.LSTMCell(x.shape[1], cell.hidden_size)
    into, bias = cell.input.weight.chunk(4), cell.input.bias.chunk(4)
    below = [cell.below.weight[:4], *cell.below.weight[4:].chunk(3)]
    weights = [torch.cat([each[gate] for gate in (i, f, u, o)]) for each in (into, below, bias)]
    named = dict(zip(("weight_ih", "weight_hh", "bias_ih"), weights, strict=True))
    named["bias_hh"] = torch.zeros_like(weights[2])
    found = []
    for features in x.split(sizes):
        state = (x.new_zeros(4), x.new_zeros(4))
        steps = []
        for step in features.flip(0):
            state = torch.func.functional_call(one, named, (step, state))
            steps.append(state[0])
        found += [torch.stack(steps).flip(0)]
    return torch.cat(found)


@pytest.mark.parametrize("sizes", SIZES)
def test_outputs_and_gradients_are_those_of_each_chain_alone(sizes: list[int]) -> None:
    torch.manual_seed(0)
    cell = ChildSumLSTMCell(3, 4).double()
    x = torch.randn(sum(sizes), 3, dtype=torch.float64, requires_grad=True)
    trees = TreeBatch.from_parents(chains(sizes), inputs={"node": np.arange(len(x))})
    found = trees.in_node_order(TreeRNN(cell)(x[trees.inputs["node"]], trees))
    expected = outputs_of_each(cell, x, sizes)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights, by = torch.randn_like(found), [x, *cell.parameters()]
    gradients = [torch.autograd.grad((each * weights).sum(), by) for each in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [*SIZES, [2000, *[10] * 31], list(range(1000, 2000, 31))])
def test_at_most_half_of_a_group_is_padding(sizes: list[int]) -> None:
    plan = TreeBatch.from_parents(chains(sizes)).plan
    padded = plan.padded_chains
    assert sum(group.size for group in padded.groups) <= 2 * plan.num_nodes
    places = np.concatenate([group.ravel() for group in padded.groups])
    assert np.array_equal(places[padded.slots], plan.order.argsort()[plan.node_of_row])
    assert len(np.unique(padded.slots)) == plan.num_nodes


def test_chains_of_similar_length_are_one_group() -> None:
    plan = TreeBatch.from_parents(chains(list(range(1000, 2000, 31)))).plan
    assert len(plan.padded_chains.groups) == 1
