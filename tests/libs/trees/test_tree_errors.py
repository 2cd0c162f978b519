"""Bad trees and DAGs are rejected with the names of tree and node, before any cell is called."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.errors import DataError
from shoal.libs.trees import Cell, TreeBatch, TreeError, TreeRNN


class Never(Cell):
    """For trees that must be rejected before."""

    max_arity = 2

    def project(self, x: Tensor) -> Tensor:
        raise AssertionError("called")

    def run_batch(self, x: Tensor, plan: object) -> Tensor | None:
        raise AssertionError("called")


def rejects(tree: int | None, node: int | None, match: str, make: Callable[[], Any]) -> None:
    with pytest.raises(TreeError, match=match) as caught:
        make()
    assert (caught.value.tree, caught.value.node) == (tree, node)
    assert isinstance(caught.value, DataError)
    again = pickle.loads(pickle.dumps(caught.value))  # from a worker
    assert (again.tree, again.node, str(again)) == (tree, node, str(caught.value))
    named = "batch" if tree is None else f"tree {tree}" if node is None else f"tree {tree}, node {node}"
    assert named in str(again)


GOOD = [-1, 0, 0]
CHAIN = [-1, *range(9_999)]


@pytest.mark.parametrize(
    ("tree", "node", "match", "parents"),
    [
        (1, 1, "on a cycle", [GOOD, [2, 0, 1]]),
        (1, 2, "on a cycle", [GOOD, [-1, 0, 2], GOOD]),
        (1, 2, "second root", [GOOD, [-1, 0, -1]]),
        (1, 1, "node 3, is missing: there are 3 nodes", [GOOD, [-1, 3, 0]]),
        (1, 2, "node -2, is missing", [GOOD, [-1, 0, -2]]),
        (None, None, "no trees", []),
        (1, None, "no nodes", [GOOD, []]),
        (0, 0, "9999 levels below it: more than max_depth = 4096", [CHAIN]),
        (1, None, "float64", [GOOD, [-1.0, 0.0]]),
        (1, None, "bool", [GOOD, [True, False]]),
        (1, None, "shape", [GOOD, [[-1, 0], [0, 0]]]),
        (1, None, "no array", [GOOD, [[-1, 0], [0]]]),
        (0, None, "shape", GOOD),
    ],
)
def test_bad_parents(tree: int | None, node: int | None, match: str, parents: Any) -> None:
    rejects(tree, node, match, lambda: TreeBatch.from_parents(parents))


STAR = [(1, 0), (2, 0)]


@pytest.mark.parametrize(
    ("tree", "node", "match", "sizes", "edges"),
    [
        (1, 1, "on a cycle", [3, 3], [STAR, [(0, 1), (1, 2), (2, 0)]]),
        (1, 2, "second root", [3, 3], [STAR, [(1, 0)]]),
        (1, 3, "an edge has it as its child", [3, 3], [STAR, [(1, 0), (3, 0)]]),
        (1, 5, "an edge has it as its parent", [3, 3], [STAR, [(1, 0), (2, 5)]]),
        (None, None, "no trees", [], []),
        (1, None, "no nodes", [3, 0], [STAR, []]),
        (None, None, "edges of 1 graphs and sizes of 2", [3, 3], [STAR]),
        (0, 5902, "more than 4096 levels", [10_000], [[(node, node - 1) for node in range(9_999, 0, -1)]]),
        (1, None, "float64", [3, 3], [STAR, [(1.0, 0.0)]]),
        (1, None, "pairs", [3, 3], [STAR, [(1, 0, 2), (2, 0, 1)]]),
        (None, None, "float64", [3.0, 3.5], [STAR, STAR]),
    ],
)
def test_bad_edges(tree: int | None, node: int | None, match: str, sizes: Any, edges: Any) -> None:
    rejects(tree, node, match, lambda: TreeBatch.from_edges(sizes, edges))


def nest(depth: int) -> Any:
    tree: Any = 0
    for _ in range(depth):
        tree = (tree,)
    return tree


def test_bad_nested() -> None:
    rejects(1, 2, "it is None", lambda: TreeBatch.from_nested([(1, 2), (1, None)]))
    rejects(1, 0, "it is None", lambda: TreeBatch.from_nested([(1, 2), None]))
    rejects(None, None, "no trees", lambda: TreeBatch.from_nested([]))
    rejects(1, 4097, "max_depth = 4096 levels", lambda: TreeBatch.from_nested([(1, 2), nest(10_000)]))
    itself: list[Any] = [1]
    itself += [itself, itself]
    rejects(1, 17, "contain itself", lambda: TreeBatch.from_nested([(1, 2), itself], max_depth=8))
    rejects(None, None, "'y' that make no tensor", lambda: TreeBatch.from_nested([(1,)], labels={"y": str}))
    rejects(None, None, "no tensor", lambda: TreeBatch.from_nested([(1,)], labels={"y": lambda node: node}))


def test_bad_padded() -> None:
    def make(parents: Any, exists: Any = None, **values: Any) -> Callable[[], TreeBatch]:
        parents = np.array(parents)
        there = np.ones(parents.shape, bool) if exists is None else np.array(exists)
        return lambda: TreeBatch.from_padded(parents, there, **values)

    exists = [[True, True, True, True], [True, False, True, True]]
    good = [-1, 0, 0, 0]
    rejects(1, 2, "node 1, is missing: it is padding", make([good, [-1, 0, 1, 0]], exists))
    rejects(1, 2, "node 4, is missing: there are 4 nodes", make([good, [-1, 0, 4, 0]], exists))
    rejects(1, 2, "node -2, is missing", make([good, [-1, 0, -2, 0]], exists))
    rejects(1, 2, "on a cycle", make([good, [-1, 0, 3, 2]], exists))
    rejects(1, 3, "second root", make([good, [-1, 0, 0, -1]], exists))
    rejects(1, None, "no nodes", make([good, good], [[True] * 4, [False] * 4]))
    rejects(None, None, "no trees", make(np.zeros((0, 3), int)))
    rejects(0, 1, "9998 levels", make([[0, -1, *range(1, 9_999)]], [[False, *[True] * 9_999]]))
    rejects(None, None, "float64", make([[-1.0, 0.0]]))
    rejects(None, None, "int64 for the nodes that exist", make([[-1, 0]], [[1, 1]]))
    rejects(None, None, "shape", make([[-1, 0]], [[True]]))
    rejects(None, None, r"'x' of the shape \[2, 3\]", make([good, good], inputs={"x": np.ones((2, 3))}))


def test_bad_values() -> None:
    def make(values: Any) -> Callable[[], TreeBatch]:
        return lambda: TreeBatch.from_parents([GOOD, GOOD], labels={"y": values})

    rejects(None, None, "6 nodes and 5 values of 'y'", make(np.ones(5)))
    rejects(None, None, "6 nodes and 0 values of 'y'", make([]))
    rejects(None, None, "6 nodes and one value of 'y'", make(1.0))
    rejects(1, None, "3 nodes and 2 values of 'y'", make([np.ones(3), np.ones(2)]))
    rejects(None, None, "6 nodes and 3 values of 'y'", make([np.ones(3)]))
    rejects(None, None, "no tensor", make(["a"] * 6))
    rejects(None, None, "no tensor", make([np.ones((3, 1)), np.ones((3, 2))]))
    trees = TreeBatch.from_parents([GOOD])
    rejects(None, None, "3 nodes and 2 values of 'tokens'", lambda: trees.arrange_inputs([1, 2], "tokens"))
    rejects(None, None, "float64", lambda: trees.select(torch.ones(3), [0.0], [1]))


@pytest.mark.parametrize("as_edges", [False, True])
def test_bad_trees_for_a_cell(as_edges: bool) -> None:
    parents = [GOOD, [1, -1, 1, 4, 1], GOOD, [-1, 0, 0, 0]]
    trees = (
        TreeBatch.from_edges(
            [len(each) for each in parents],
            [[(node, up) for node, up in enumerate(each) if up >= 0] for each in parents],
        )
        if as_edges
        else TreeBatch.from_parents(parents)
    )
    rnn = TreeRNN(Never())
    rejects(3, 0, "3 children, and the cell takes at most 2", lambda: rnn(torch.ones(15, 1), trees))
    rejects(None, None, "15 nodes, and x has 14 rows", lambda: rnn(torch.ones(14, 1), trees))


def test_greater_depth_where_it_is_meant() -> None:
    rejects(0, 0, "max_depth = 2", lambda: TreeBatch.from_parents([[-1, 0, 1, 2]], max_depth=2))
    assert TreeBatch.from_parents([[-1, 0, 1, 2]], max_depth=3).plan.num_levels == 4
    deep = TreeBatch.from_parents([CHAIN], max_depth=10_000)
    assert deep.plan.num_levels == 10_000
    assert deep.slice_samples(slice(0, 1)).plan.num_levels == 10_000
    nested = TreeBatch.from_nested([nest(9_999)], max_depth=10_000)
    assert nested.plan is deep.plan
