"""Long chains, wide nodes and large levels, as the recursion by the equations; chains padded in groups by their length.

Chains of 1,100 nodes, which Python does not recurse over, nodes with 500 children and levels of 2,100 nodes. Padded
chains are computed as torch's LSTM computes each alone, and with little padding.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
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

from shoal.libs.trees import TreeBatch


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


def test_chains_of_similar_length_are_one_group() -> None:
    plan = TreeBatch.from_parents([list(range(-1, size - 1)) for size in range(1000, 2000, 31)]).plan
    assert len(plan.padded_chains.groups) == 1
