"""A batch of trees or DAGs of any shapes, with what is known of each node, arranged as its plan computes it.

Owns the constructors and their checks. Called by collate functions, mostly in a loader's worker processes, and by
endpoints. Legend: T trees, N nodes of all trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from shoal.batch_tree import SampleBatch
from shoal.errors import DataError, TreeError
from shoal.frame import unwrap_rows
from shoal.libs.trees.plan import Ints, TreePlan
from shoal.libs.trees.planner import MAX_DEPTH, plan_forest, plan_graphs

Values = Mapping[str, Any]  # for each name: a value of each node, of all trees one after the other


@dataclass(frozen=True, eq=False)
class TreeBatch(SampleBatch):
    """Trees with their plan.

        trees = TreeBatch.from_parents([[-1, 0, 0], [-1]], inputs={"token": [4, 1, 2, 3]}, labels={"y": [0, 1, 1, 0]})
        h = TreeRNN(cell)(embedding(trees.inputs["token"]), trees)  # [N, H], a row for each node, in output order
        loss = cross_entropy(head(h), trees.labels["y"])

    inputs: by name, [N, ...] in input order: what a model reads
    labels: by name, [N, ...] in output order: what is compared with a model's outputs
    A sample is a tree: `shoal.data.Loader` and every plan of training take it as a batch, or as a part of one.
    """

    plan: TreePlan
    inputs: dict[str, Tensor] = field(default_factory=dict)
    labels: dict[str, Tensor] = field(default_factory=dict)

    # -- from what users have

    @classmethod
    def from_parents(
        cls,
        parents: Sequence[Sequence[int] | Ints],
        *,
        inputs: Values | None = None,
        labels: Values | None = None,
        max_depth: int = MAX_DEPTH,
    ) -> Self:
        """Make a batch from each node's parent, for each tree; -1: the root. Siblings keep the order of their numbers.

        inputs, labels: for each name the nodes' values, of all trees one after the other: an array or tensor [N, ...],
                        or a list with one array for each tree. Rows of pandas must be in the order of their index

        Raises TreeError, naming tree and node, for a cycle, two roots, a missing parent, no trees, an empty tree, more
        than `max_depth` levels, or not one value for each node.
        """
        arrays = [_as_ints(tree, index, "the parents", 1) for index, tree in enumerate(parents)]
        sizes = np.array([len(tree) for tree in arrays], np.int64)
        plan = plan_forest(sizes, np.concatenate(arrays) if arrays else np.zeros(0, np.int64), max_depth)
        return cls(plan)._with(inputs, labels)

    @classmethod
    def from_edges(
        cls,
        sizes: Sequence[int],
        edges: Sequence[Sequence[tuple[int, int]] | Ints],
        *,
        inputs: Values | None = None,
        labels: Values | None = None,
        max_depth: int = MAX_DEPTH,
    ) -> Self:
        """DAGs from (child, parent) pairs: a node may have several parents; each graph has one root.

        sizes: nodes of each graph; the children of a node are in the order of its edges
        inputs, labels, errors: see `from_parents`
        """
        pairs = []
        for index, graph in enumerate(edges):
            ends = _as_ints(graph, index, "the edges")
            if ends.size and (ends.ndim != 2 or ends.shape[1] != 2):
                problem = f"has the edges in the shape {[*ends.shape]}"
                raise TreeError(index, None, problem, "give (child, parent) pairs")
            pairs.append(ends.reshape(-1, 2))
        sizes_T = _as_ints(sizes, None, "the sizes", 1)
        if len(pairs) != len(sizes_T):
            raise TreeError(None, None, f"has edges of {len(pairs)} graphs and sizes of {len(sizes_T)}")
        joined = np.concatenate(pairs) if pairs else np.zeros((0, 2), np.int64)
        edge_sizes = np.array([len(graph) for graph in pairs], np.int64)
        plan = plan_graphs(sizes_T, edge_sizes, joined[:, 0].copy(), joined[:, 1].copy(), max_depth)
        return cls(plan)._with(inputs, labels)

    @classmethod
    def from_nested(
        cls,
        trees: Sequence[Any],
        children: Callable[[Any], Iterable[Any]] | None = None,
        *,
        inputs: Mapping[str, Callable[[Any], Any]] | None = None,
        labels: Mapping[str, Callable[[Any], Any]] | None = None,
        max_depth: int = MAX_DEPTH,
    ) -> Self:
        """Make a batch from objects that hold their children: nested sequences, or anything with a `children` function.

            TreeBatch.from_nested([((1, 2), 3)], inputs={"token": lambda node: node if isinstance(node, int) else 0})

        children:       of a node, such as `ast.iter_child_nodes`; None: the members of a tuple or list, everything else
                        is a leaf
        inputs, labels: for each name a function from a node to its value

        Nodes are numbered in preorder. Raises TreeError as `from_parents`, also for an object that contains itself.
        """
        of = children or (lambda node: node if isinstance(node, tuple | list) else ())
        parents, nodes = [], []
        for index, tree in enumerate(trees):
            above, below = _flatten(tree, of, index, max_depth)
            parents.append(above)
            nodes += below

        def read(functions: Mapping[str, Callable[[Any], Any]] | None) -> Values:
            return {
                name: _stack([function(node) for node in nodes], name) for name, function in (functions or {}).items()
            }

        return cls.from_parents(parents, inputs=read(inputs), labels=read(labels), max_depth=max_depth)

    @classmethod
    def from_padded(
        cls,
        parents: Ints,
        exists: np.ndarray,
        *,
        inputs: Mapping[str, np.ndarray | Tensor] | None = None,
        labels: Mapping[str, np.ndarray | Tensor] | None = None,
        max_depth: int = MAX_DEPTH,
    ) -> Self:
        """Make a batch from rectangular arrays [T, most nodes], as in requests: a row's nodes that exist are a tree.

        exists:         whether each place has a node
        inputs, labels: for each name [T, most nodes, ...]

        Raises TreeError as `from_parents`; its node numbers are those of the row.
        """
        parents, exists = _as_ints(parents, None, "the parents"), np.asarray(exists)
        if exists.dtype != bool:
            raise TreeError(None, None, f"has the type {exists.dtype} for the nodes that exist, not bool")
        if parents.ndim != 2 or parents.shape != exists.shape:
            problem = f"has parents of the shape {[*parents.shape]} and nodes of the shape {[*exists.shape]}"
            raise TreeError(None, None, problem, "give both as [trees, nodes]")
        ends, width = np.where(exists, parents, -1), exists.shape[1]
        within = np.clip(ends, 0, max(width - 1, 0))
        is_there = (ends == -1) | ((ends == within) & np.take_along_axis(exists, within, 1))
        if not is_there.all():
            tree, node = (int(each[0]) for each in np.nonzero(~is_there))
            end = int(ends[tree, node])
            problem = "it is padding" if 0 <= end < width else f"there are {width} nodes"
            raise TreeError(tree, node, f"its parent, node {end}, is missing: {problem}")
        number = np.cumsum(exists, 1) - 1  # of the nodes that exist
        renumbered = np.where(ends < 0, ends, np.take_along_axis(number, within, 1))
        try:
            plan = plan_forest(exists.sum(1), renumbered[exists], max_depth)
        except TreeError as error:
            if error.tree is None or error.node is None:
                raise
            position = int(np.flatnonzero(exists[error.tree])[error.node])
            raise TreeError(error.tree, position, error.problem, error.remedy) from None

        def read(values: Mapping[str, np.ndarray | Tensor] | None) -> Values:
            for name, value in (values or {}).items():
                if value.shape[:2] != exists.shape:
                    problem = f"has values of {name!r} of the shape {[*value.shape]}, and nodes of {[*exists.shape]}"
                    raise TreeError(None, None, problem)
            return {name: value[exists] for name, value in (values or {}).items()}

        return cls(plan)._with(read(inputs), read(labels))

    def _with(self, inputs: Values | None, labels: Values | None) -> Self:
        return replace(
            self,
            inputs={name: self.arrange_inputs(value, name) for name, value in (inputs or {}).items()},
            labels={name: self.arrange_outputs(value, name) for name, value in (labels or {}).items()},
        )

    # -- sizes

    @property
    def sizes(self) -> Ints:
        """[T] nodes of each tree."""
        return self.plan.sizes

    @property
    def num_trees(self) -> int:
        return self.plan.num_trees

    @property
    def num_nodes(self) -> int:
        return self.plan.num_nodes

    def __len__(self) -> int:
        return len(self.sizes)

    # -- between the orders

    def arrange_inputs(self, values: Any, name: str = "values") -> Tensor:
        """Values of the nodes as they came, [N, ...], in input order. Raises TreeError for another number."""
        return self._arrange(values, self.plan.order, name)

    def arrange_outputs(self, values: Any, name: str = "values") -> Tensor:
        """Values of the nodes as they came, [N, ...], in output order. Raises TreeError for another number."""
        return self._arrange(values, self.plan.node_of_row, name)

    def _arrange(self, values: Any, nodes: Ints, name: str) -> Tensor:
        values = unwrap_rows(name, values)
        if isinstance(values, list | tuple) and values and not isinstance(values[0], int | float):
            values = [unwrap_rows(name, value) for value in values]
        if isinstance(values, list | tuple) and values and isinstance(values[0], np.ndarray | Tensor | list | tuple):
            for tree, (value, size) in enumerate(zip(values, self.sizes, strict=False)):
                if len(value) != size:
                    raise TreeError(tree, None, f"has {size} nodes and {len(value)} values of {name!r}")
            with _name_values(name):
                values = torch.cat([torch.as_tensor(np.array(v) if isinstance(v, np.ndarray) else v) for v in values])
        array = values if isinstance(values, np.ndarray | Tensor) else _stack(values, name)
        if array.ndim == 0 or len(array) != self.num_nodes:
            count = f"{len(array)} values" if array.ndim else "one value"
            raise TreeError(None, None, f"has {self.num_nodes} nodes and {count} of {name!r}")
        if isinstance(array, np.ndarray):
            with _name_values(name):
                return torch.from_numpy(array.take(nodes, 0))
        return array.index_select(0, self._indices(nodes, array))

    def in_node_order(self, outputs: Tensor) -> Tensor:
        """Outputs [N, ...] as the nodes came."""
        return outputs.index_select(0, self._indices(self.plan.row_of_node, outputs))

    def to_output_order(self, values: Tensor) -> Tensor:
        """Values [N, ...] in input order, such as a model's features, in output order: to be added to outputs."""
        return values.index_select(0, self._indices(self.plan.position_of_row, values))

    def roots(self, outputs: Tensor) -> Tensor:
        """The outputs of the roots, [T, ...]; of trees a view."""
        if self.plan.is_forest:
            return outputs[len(outputs) - self.num_trees :]
        return outputs.index_select(0, self._indices(self.plan.root_row, outputs))

    def select(self, outputs: Tensor, trees: Sequence[int] | Ints, nodes: Sequence[int] | Ints) -> Tensor:
        """The outputs of chosen nodes, [k, ...]: node `nodes[i]` of tree `trees[i]`. Raises TreeError for a missing
        one."""
        chosen, within = _as_ints(trees, None, "the trees", 1), _as_ints(nodes, None, "the nodes", 1)
        for tree, node in zip(chosen.tolist(), within.tolist(), strict=True):
            if not 0 <= tree < self.num_trees or not 0 <= node < self.sizes[tree]:
                raise TreeError(tree, node, "is missing")
        return outputs.index_select(
            0, self._indices(self.plan.row_of_node[self.plan.first_node[chosen] + within], outputs)
        )

    def mean_per_tree(self, values: Tensor, where: Tensor | None = None) -> Tensor:
        """The mean over each tree's nodes, [T], of values [N] in output order; over those where `where` [N], of bools,
        is true: 0 if none. In float32 at least: 16 bits cannot count above 256.

        A loss of nodes becomes one of trees: `trees.mean_per_tree(losses).mean()` is a mean over samples.
        """
        tree = self._indices(self.plan.tree_of_node[self.plan.node_of_row], values)
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        counted = torch.ones_like(values) if where is None else where.to(values.dtype)
        if where is not None:
            values = values.masked_fill(~where, 0)  # also what is not finite
        sums = values.new_zeros(self.num_trees).index_add(0, tree, values)
        return sums / values.new_zeros(self.num_trees).index_add(0, tree, counted).clamp(min=1)

    @staticmethod
    def _indices(indices: Ints, like: Tensor) -> Tensor:
        return torch.from_numpy(indices).to(like.device)

    # -- as a batch: see shoal.batch_tree

    def count_samples(self) -> int:
        return self.num_trees

    def tensors(self) -> Iterator[Tensor]:
        yield from (*self.inputs.values(), *self.labels.values())

    def map_tensors(self, function: Callable[[Tensor], Any]) -> Self:
        inputs, labels = ({name: function(each) for name, each in d.items()} for d in (self.inputs, self.labels))
        return replace(self, inputs=inputs, labels=labels)

    def slice_samples(self, part: slice) -> Self:
        """Some of the trees, planned again. Raises TreeError for none of them, and ValueError for a step below 1."""
        if part.step is not None and part.step < 1:
            raise ValueError(f"the step of a slice of trees is {part.step}, and must be at least 1")
        plan, chosen = self.plan, np.arange(self.num_trees)[part]
        is_chosen = np.isin(self.plan.tree_of_node, chosen)
        sizes = self.sizes[chosen]
        within = np.arange(self.num_nodes) - self.plan.first_node[self.plan.tree_of_node]
        rows = np.arange(len(plan.edge_parent)) if plan.child_row is None else plan.child_row
        child, parent = plan.node_of_row[rows], plan.order[plan.num_leaves + plan.edge_parent]
        if plan.is_forest:
            parents = np.full(self.num_nodes, -1)
            parents[child] = within[parent]
            new = plan_forest(sizes, parents[is_chosen], self.num_nodes)
        else:
            edges = np.flatnonzero(is_chosen[child])
            edges = edges[np.argsort(self.plan.tree_of_node[child[edges]], kind="stable")]
            edge_sizes = np.bincount(self.plan.tree_of_node[child[edges]], minlength=self.num_trees)[chosen]
            new = plan_graphs(sizes, edge_sizes, within[child[edges]], within[parent[edges]], self.num_nodes)

        def of(values: dict[str, Tensor], node_of_position: Ints) -> dict[str, Tensor]:
            positions = np.argsort(node_of_position)[is_chosen]
            return {name: each.index_select(0, self._indices(positions, each)) for name, each in values.items()}

        return type(self)(new)._with(of(self.inputs, plan.order), of(self.labels, plan.node_of_row))


def _as_ints(values: Any, tree: int | None, what: str, ndim: int | None = None) -> Ints:
    try:
        array = np.asarray(unwrap_rows(what, values))
    except DataError:
        raise
    except (TypeError, ValueError) as error:
        raise TreeError(tree, None, f"has {what} in a form that is no array: {error}") from error
    if array.size and array.dtype.kind not in "iu":
        raise TreeError(tree, None, f"has {what} as numbers of the type {array.dtype}, not whole numbers")
    if ndim is not None and array.ndim != ndim:
        raise TreeError(tree, None, f"has {what} in the shape {[*array.shape]}, not as {ndim} dimension(s)")
    return array.astype(np.int64)


def _stack(values: Any, name: str) -> Tensor | np.ndarray:
    """Join one value of each node, as one tensor or array; Python's floats have torch's default type."""
    with _name_values(name):
        first = values[0] if isinstance(values, list | tuple) and values else None
        if isinstance(first, np.ndarray | np.generic):
            return np.array(values)
        return torch.stack([*values]) if isinstance(first, Tensor) else torch.as_tensor(values)


@contextmanager
def _name_values(name: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        raise TreeError(None, None, f"has values of {name!r} that make no tensor: {error}") from error


def _flatten(tree: Any, children: Callable[[Any], Iterable[Any]], index: int, max_depth: int) -> tuple[Ints, list[Any]]:
    """Parents and nodes in preorder."""
    parents: list[int] = []
    nodes: list[Any] = []
    waiting: list[tuple[Any, int, int]] = [(tree, -1, 0)]
    while waiting:
        node, parent, depth = waiting.pop()
        if node is None:
            raise TreeError(index, len(nodes), "is missing: it is None")
        if depth > max_depth:
            problem = f"is more than max_depth = {max_depth} levels below the root"
            raise TreeError(index, len(nodes), problem, "raise max_depth, if the tree does not contain itself")
        parents.append(parent)
        nodes.append(node)
        place = len(nodes) - 1
        waiting += [(child, place, depth + 1) for child in reversed([*children(node)])]
    return np.array(parents, np.int64), nodes
