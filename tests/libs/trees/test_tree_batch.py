"""Batches of trees and DAGs: their constructors, orders and parts, and their way through a loader's workers."""

import ast
import pickle
import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.batch_tree import count_samples, map_tensors, move_to_device, slice_samples, tensors_of
from shoal.data import Loader, LoaderSpec
from shoal.data.workers.shm_transfer import receive, send
from shoal.errors import DataError
from shoal.libs.trees import Cell, Children, ChildSumLSTMCell, TreeBatch, TreeError, TreeRNN
from shoal.libs.trees.planner import _plans

# A root with two children, of which the second has two; a single node; a chain of three, its root in the middle.
PARENTS = [[-1, 0, 0, 2, 2], [-1], [1, -1, 0]]
VALUES = list(range(9))
SIZES = [5, 1, 3]


def edges_of(parents: Sequence[int]) -> list[tuple[int, int]]:
    return [(node, parent) for node, parent in enumerate(parents) if parent >= 0]


def padded(rows: Sequence[Sequence[int]], fill: int = -1) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([[*row, *[fill] * (width - len(row))] for row in rows])


class Path(Cell):
    """Of each node: its own value, and those below it in the order of the children, as digits."""

    def forward(self, x: Tensor, children: Children) -> tuple[Tensor, Tensor]:
        if not children:
            return x, torch.ones_like(x)
        value, weight = (children.stack(each) for each in children.states)
        for child in range(value.shape[1]):
            x = x * 10 * weight[:, child] + value[:, child]
        return x, 10 * weight.prod(1)

    max_arity = 9


def spell(trees: TreeBatch) -> list[list[float]]:
    """What `Path` says of each node, as the nodes came."""
    x = trees.inputs["value"].double().unsqueeze(1)
    made: list[list[float]] = trees.in_node_order(TreeRNN(Path())(x, trees)).tolist()
    return made


class Node:
    def __init__(self, value: int, *children: Any) -> None:
        self.value, self.children = value, children


def make_each_way() -> dict[str, TreeBatch]:
    """The same trees, nodes in the same order: preorder, as `from_nested` numbers them."""
    parents = [[-1, 0, 0, 2, 2], [-1], [-1, 0, 1]]
    arrays = [VALUES[:5], VALUES[5:6], VALUES[6:]]
    objects = [Node(0, Node(1), Node(2, Node(3), Node(4))), Node(5), Node(6, Node(7, Node(8)))]
    exists = padded([[1] * size for size in SIZES], 0).astype(bool)
    grid = padded(arrays)
    return {
        "parents": TreeBatch.from_parents(parents, inputs={"value": VALUES}, labels={"value": np.array(VALUES)}),
        "tensors": TreeBatch.from_parents(
            [torch.tensor(each) for each in parents],
            inputs={"value": arrays},
            labels={"value": [torch.tensor(each) for each in arrays]},
        ),
        "edges": TreeBatch.from_edges(
            SIZES, [edges_of(each) for each in parents], inputs={"value": VALUES}, labels={"value": VALUES}
        ),
        "nested": TreeBatch.from_nested(
            objects,
            lambda node: iter(node.children),
            inputs={"value": lambda node: node.value},
            labels={"value": lambda node: np.int64(node.value)},
        ),
        "padded": TreeBatch.from_padded(
            padded(parents), exists, inputs={"value": grid}, labels={"value": torch.from_numpy(grid)}
        ),
    }


@pytest.mark.parametrize("way", ["parents", "tensors", "edges", "nested", "padded"])
def test_constructors_agree(way: str) -> None:
    trees, expected = make_each_way()[way], make_each_way()["parents"]
    assert (len(trees), trees.num_trees, trees.num_nodes, trees.sizes.tolist()) == (3, 3, 9, SIZES)
    assert spell(trees) == spell(expected)
    assert trees.in_node_order(trees.labels["value"]).tolist() == VALUES
    assert trees.roots(trees.labels["value"]).tolist() == [0, 5, 6]
    assert trees.inputs["value"].dtype == trees.labels["value"].dtype == torch.int64


def test_nested_tuples_and_syntax_trees() -> None:
    trees = TreeBatch.from_nested(
        [((1, [2]), 3), 4], inputs={"token": lambda node: node if isinstance(node, int) else 0}
    )
    assert trees.sizes.tolist() == [6, 1]
    assert (
        trees.plan.row_of_node.tolist() == TreeBatch.from_parents([[-1, 0, 1, 1, 3, 0], [-1]]).plan.row_of_node.tolist()
    )
    assert sorted(trees.inputs["token"].tolist()) == [0, 0, 0, 1, 2, 3, 4]
    module = ast.parse("a = b + 1")
    trees = TreeBatch.from_nested([module], ast.iter_child_nodes, labels={"fields": lambda node: len(node._fields)})
    assert trees.num_nodes == len(list(ast.walk(module)))
    assert trees.roots(trees.labels["fields"]).tolist() == [len(module._fields)]


def test_padding_may_be_anywhere() -> None:
    exists = np.array([[False, True, True, False, True], [True, False, False, False, False]])
    parents = np.array([[7, 4, 4, 0, -1], [-1, 3, 3, 3, 3]])  # what is in places without a node does not matter
    trees = TreeBatch.from_padded(parents, exists, inputs={"value": np.arange(10).reshape(2, 5)})
    assert trees.sizes.tolist() == [3, 1]
    assert spell(trees) == spell(TreeBatch.from_parents([[2, 2, -1], [-1]], inputs={"value": [1, 2, 4, 5]}))


def test_values_keep_their_type_and_shape() -> None:
    values = {
        "floats": [0.5] * 9,
        "doubles": np.full(9, 0.5),
        "bools": [True] * 9,
        "vectors": np.ones((9, 2), np.float32),
        "lists": [[0.5] * size for size in SIZES],
        "half": torch.ones(9, 3, dtype=torch.bfloat16),
        "strided": np.arange(18)[::-2],
        "each": [np.ones((size, 2), np.float32) for size in SIZES],
    }
    fixed = np.arange(9)
    fixed.flags.writeable = False  # as of a file that is mapped
    trees = TreeBatch.from_parents(PARENTS, inputs={**values, "fixed": fixed})
    assert {name: (each.dtype, [*each.shape]) for name, each in trees.inputs.items()} == {
        "floats": (torch.float32, [9]),
        "doubles": (torch.float64, [9]),
        "bools": (torch.bool, [9]),
        "vectors": (torch.float32, [9, 2]),
        "lists": (torch.float32, [9]),
        "half": (torch.bfloat16, [9, 3]),
        "strided": (torch.int64, [9]),
        "each": (torch.float32, [9, 2]),
        "fixed": (torch.int64, [9]),
    }
    assert trees.arrange_inputs(torch.ones(9, requires_grad=True)).requires_grad
    assert trees.arrange_inputs(torch.ones(9, device="meta")).device.type == "meta"
    stacked = TreeBatch.from_nested([(1, 2)], inputs={"x": lambda node: torch.ones(2), "y": lambda node: [1.0, 2.0]})
    assert [each.shape for each in stacked.inputs.values()] == [(3, 2), (3, 2)]


# -- outputs


def test_orders_and_selections() -> None:
    for trees in make_each_way().values():
        labels = trees.labels["value"]
        assert trees.arrange_outputs(VALUES).equal(labels)
        assert trees.arrange_inputs(VALUES).equal(trees.inputs["value"])
        assert trees.to_output_order(trees.inputs["value"]).equal(labels)
        assert trees.select(labels, [2, 0, 0], np.array([1, 4, 4])).tolist() == [7, 4, 4]
        assert trees.select(labels, [], []).tolist() == []
        for tree, node in ((3, 0), (0, 5), (-1, 0), (1, -1)):
            with pytest.raises(TreeError, match="is missing") as caught:
                trees.select(labels, [0, tree], [0, node])
            assert (caught.value.tree, caught.value.node) == (tree, node)


def test_means_of_trees() -> None:
    for trees in make_each_way().values():
        values = trees.labels["value"].float().requires_grad_()
        assert trees.mean_per_tree(values).tolist() == [2, 5, 7]
        where = values < 3
        unknown = torch.where(where, values, torch.inf)
        means = trees.mean_per_tree(unknown, where)
        assert means.tolist() == [1, 0, 0], "over nodes that are not counted nothing may pass, infinity neither"
        (grad,) = torch.autograd.grad(means.sum(), values)
        assert trees.in_node_order(grad).tolist() == pytest.approx([1 / 3] * 3 + [0] * 6)


def test_means_of_trees_are_counted_in_float32_at_least() -> None:
    trees = TreeBatch.from_parents([range(-1, 999), [-1, 0]])
    is_right = trees.arrange_outputs(torch.arange(1002) % 2 == 0)
    for values in (is_right, is_right.bfloat16(), is_right.half()):
        assert trees.mean_per_tree(values).tolist() == [0.5, 0.5]
    assert trees.mean_per_tree(is_right.double()).dtype == torch.float64


# -- parts


def forest_or_dags(drawn: list[list[list[int]]], as_dag: bool) -> tuple[TreeBatch, Callable[[slice], TreeBatch]]:
    """Graphs by the children of each node; and their parts, made from nothing else."""
    graphs = []
    for choices in drawn:
        edges = [(node, 1 + node + choice % 3) for node, chosen in enumerate(choices) for choice in chosen]
        last = len(choices) + 3
        graphs.append([(child, min(parent, last)) for child, parent in edges])
    graphs = [
        [*edges, *[(node, len(choices) + 3) for node in range(len(choices) + 3) if node not in dict(edges)]]
        for edges, choices in zip(graphs, drawn, strict=True)
    ]
    sizes = [len(choices) + 4 for choices in drawn]
    values = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])

    def make(part: slice) -> TreeBatch:
        given = {"inputs": {"value": values[part]}, "labels": {"value": values[part]}}
        if as_dag:
            return TreeBatch.from_edges(sizes[part], graphs[part], **given)
        parents = [
            [dict(edges).get(node, -1) for node in range(size)] for edges, size in zip(graphs, sizes, strict=True)
        ]
        return TreeBatch.from_parents(parents[part], **given)

    return make(slice(None)), make


@pytest.mark.parametrize("as_dag", [False, True], ids=["trees", "dags"])
@given(
    drawn=st.lists(st.lists(st.lists(st.integers(0, 2), max_size=2), max_size=5), min_size=1, max_size=6),
    part=st.tuples(st.integers(-7, 6), st.integers(1, 7), st.integers(1, 3)),
)
@settings(max_examples=60)
def test_parts_are_what_their_trees_alone_would_be(
    drawn: list[list[list[int]]], as_dag: bool, part: tuple[int, int, int]
) -> None:
    trees, make = forest_or_dags(drawn, as_dag)
    chosen = slice(part[0], part[0] + part[1] if part[0] >= 0 else None, part[2])
    if not range(len(drawn))[chosen]:
        with pytest.raises(TreeError, match="no trees"):
            trees.slice_samples(chosen)
        return
    found, expected = trees.slice_samples(chosen), make(chosen)
    assert type(found) is TreeBatch
    for name in ("sizes", "order", "row", "arity", "level_start", "root_row"):
        assert getattr(found.plan, name).tolist() == getattr(expected.plan, name).tolist(), name
    assert found.plan.is_forest != as_dag
    if as_dag:
        assert found.plan.child_row.tolist() == expected.plan.child_row.tolist()
    assert found.inputs["value"].equal(expected.inputs["value"])
    assert found.labels["value"].equal(expected.labels["value"])


def test_parts_refuse_what_torch_refuses() -> None:
    for step in (-1, 0):
        with pytest.raises(ValueError):
            torch.arange(3)[::step]
        with pytest.raises(ValueError, match="step"):
            make_each_way()["parents"].slice_samples(slice(None, None, step))


def test_a_batch_that_holds_trees() -> None:
    trees = make_each_way()["parents"]
    batch = {"trees": trees, "y": torch.arange(3), "more": (trees.inputs["value"], "text")}
    assert count_samples(batch) == count_samples((trees, torch.ones(9))) == 3
    assert len(list(tensors_of(batch))) == 4
    part = slice_samples({"trees": trees, "y": torch.arange(3)}, slice(1, 3))
    assert part["y"].tolist() == [1, 2]
    assert part["trees"].sizes.tolist() == [1, 3]
    assert part["trees"].in_node_order(part["trees"].labels["value"]).tolist() == [5, 6, 7, 8]
    doubled = map_tensors(batch, lambda tensor: 2 * tensor)
    assert doubled["trees"].in_node_order(doubled["trees"].labels["value"]).tolist() == [2 * each for each in VALUES]
    assert doubled["trees"].plan is trees.plan
    assert trees.in_node_order(trees.labels["value"]).tolist() == VALUES
    moved = move_to_device(batch, torch.device("meta"))
    assert {each.device.type for each in tensors_of(moved)} == {"meta"}


# -- between processes


@pytest.mark.parametrize("way", ["parents", "edges"])
def test_trees_travel(way: str) -> None:
    trees = make_each_way()[way]
    spelt = spell(trees)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, {"trees": trees})
        arrived = [receive(theirs)["trees"], pickle.loads(pickle.dumps(trees))]
    cell = ChildSumLSTMCell(1, 2).double()
    for each in arrived:
        assert spell(each) == spelt
        assert each.slice_samples(slice(1, 3)).sizes.tolist() == SIZES[1:]
        TreeRNN(cell)(each.inputs["value"].double().unsqueeze(1), each).sum().backward()


class Planned:
    """Sample i: a tree of i + 1 nodes, below one root."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        return [-1] + [0] * index, index


def collate(samples: list[tuple[list[int], int]]) -> dict[str, Any]:
    parents, y = zip(*samples, strict=True)
    values = [np.full(len(tree), target) for tree, target in zip(parents, y, strict=True)]
    trees = TreeBatch.from_parents(parents, inputs={"value": values}, labels={"y": values})
    return {"trees": trees, "y": torch.tensor(y)}


def test_a_loader_s_worker_makes_the_plan() -> None:
    _plans.clear()
    cell = ChildSumLSTMCell(1, 2)
    with Loader(
        Planned(8), batch_size=4, shuffle=False, spec=LoaderSpec(workers=1, prefetch=1), collate=collate
    ) as loader:
        for number, batch in enumerate(loader):
            trees, y = batch["trees"], batch["y"]
            assert y.tolist() == [4 * number + each for each in range(4)]
            assert trees.sizes.tolist() == [1 + each for each in y.tolist()]
            h = TreeRNN(cell)(trees.inputs["value"].float().unsqueeze(1), trees)
            assert trees.roots(trees.labels["y"]).equal(y)
            h.sum().backward()
    assert number == 1
    assert not len(_plans), "this process has planned nothing"
    assert slice_samples(batch, slice(0, 2))["trees"].sizes.tolist() == [5, 6]


def test_values_of_pandas_are_taken_in_the_order_of_their_index_or_rejected() -> None:
    nodes = pd.DataFrame(
        {"tree": [0, 0, 0, 1], "parent": [-1, 0, 0, -1], "token": [4, 1, 2, 3], "size": [0.5, 1, 2, 3]}
    )
    groups = [group for _, group in nodes.groupby("tree")]
    expected = TreeBatch.from_parents([[-1, 0, 0], [-1]], inputs={"token": np.array([4, 1, 2, 3])})
    for token in (nodes.token, [group.token for group in groups]):
        trees = TreeBatch.from_parents([group.parent for group in groups], inputs={"token": token})
        assert torch.equal(trees.inputs["token"], expected.inputs["token"])
    both = TreeBatch.from_parents([[-1, 0, 0], [-1]], inputs={"x": nodes[["token", "size"]]}).inputs["x"]
    assert both.shape == (4, 2)
    moved = nodes.sort_values("token").iloc[::-1]  # the index 0, 3, 2, 1
    for inputs in ({"token": moved.token}, {"token": [moved.token[:3], moved.token[3:]]}, {"token": moved[["token"]]}):
        with pytest.raises(DataError, match=r"token = '0, 3, 2.*its index is not in order.*sort_index.*reset_index"):
            TreeBatch.from_parents([[-1, 0, 0], [-1]], inputs=inputs)
    with pytest.raises(DataError, match="its index is not in order"):
        TreeBatch.from_parents([moved.parent[:3], [-1]])
    with pytest.raises(DataError, match=r"x = 'x': row 0 has 'a', which is no number"):
        TreeBatch.from_parents([[-1, 0], [-1]], inputs={"x": pd.Series(["a", "b", "c"], name="x")})
