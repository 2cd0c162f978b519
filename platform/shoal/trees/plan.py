"""The order in which the nodes of a batch of trees or DAGs are computed: planned once, in NumPy, for the whole batch.

    level         leaves are level 0; another node is one above its highest child. Nodes of a level do not depend on
                  each other: a level is computed at once, for all trees
    input order   leaves first, then the inner nodes level by level, in a level by their number of children. What a
                  model reads of each node is in this order, so that a level reads a slice
    output order  for trees: the children of the first inner node in input order, of the second, ..., then the roots.
                  A child's row is its edge, so the children of a level are a slice too, and the roots are the last
                  rows. For DAGs, where a node may have several parents: the input order

Called by `TreeBatch`. Knows no tensors of torch, no cells and no features. Legend: T trees, N nodes, L leaves,
n = N - L inner nodes, E edges.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from shoal.errors import TreeError

Ints = NDArray[np.int64]
MAX_DEPTH = 4096  # edges from a root to a leaf, unless the caller allows more
_CACHE_BYTES = 64 * 2**20


@dataclass(frozen=True, eq=False)
class TreePlan:
    """The places, rows and levels of a batch."""

    sizes: Ints  # [T] nodes of each tree
    num_leaves: int
    order: Ints  # [N] the node at each place of the input order; nodes are numbered through all trees, as they came
    row: Ints  # [N] the output row of the node at each place
    arity: Ints  # [n] the number of children of each inner node, in input order
    level_start: Ints  # [levels above the leaves + 1] inner nodes before each level
    child_row: Ints | None  # [E] the row of each edge's child; None for trees: edge e has row e
    root_row: Ints  # [T]

    @property
    def num_trees(self) -> int:
        return len(self.sizes)

    @property
    def num_nodes(self) -> int:
        return len(self.order)

    @property
    def num_inner(self) -> int:
        return len(self.arity)

    @property
    def num_levels(self) -> int:
        """With the leaves."""
        return len(self.level_start)

    @property
    def is_forest(self) -> bool:
        """Whether every node has at most one parent."""
        return self.child_row is None

    @cached_property
    def max_arity(self) -> int:
        return int(self.arity.max(initial=0))

    @cached_property
    def first_edge(self) -> Ints:
        """[n + 1]: edges before each inner node; its children are the edges up to the next."""
        return np.append(0, np.cumsum(self.arity))

    @cached_property
    def edge_parent(self) -> Ints:
        """[E]: the parent of each edge, counted from the first inner node."""
        return np.repeat(np.arange(self.num_inner), self.arity)

    @cached_property
    def node_of_row(self) -> Ints:
        """[N]: the node in each row of the output order."""
        nodes = np.empty_like(self.order)
        nodes[self.row] = self.order
        return nodes

    @cached_property
    def position_of_row(self) -> Ints:
        """[N]: the place in the input order of each row of the output order."""
        places = np.empty_like(self.row)
        places[self.row] = np.arange(self.num_nodes)
        return places

    @cached_property
    def row_of_node(self) -> Ints:
        """[N]: the output row of each node, as they came."""
        rows = np.empty_like(self.order)
        rows[self.order] = self.row
        return rows

    @cached_property
    def first_node(self) -> Ints:
        """[T]: the number of each tree's first node."""
        return np.cumsum(self.sizes) - self.sizes

    @cached_property
    def tree_of_node(self) -> Ints:
        """[N]: the tree of each node, as they came."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    @cached_property
    def padded_chains(self) -> PaddedChains:
        """For trees whose nodes have at most one child: see there."""
        counts = np.append(self.num_leaves, np.diff(self.level_start))
        step = np.repeat(np.arange(len(counts)), counts)  # of each place: a node's level
        chain = self.tree_of_node[self.order]
        slot, first, groups = np.empty_like(step), 0, []
        waiting = np.argsort(-self.sizes, kind="stable")  # longest first
        while waiting.size:
            lengths = self.sizes[waiting]
            is_wasteful = lengths[0] * np.arange(1, len(lengths) + 1) > 2 * np.cumsum(lengths)
            end = int(np.argmax(is_wasteful)) or len(lengths)
            column = np.full(self.num_trees, -1)
            column[waiting[:end]] = np.arange(end)
            places = np.flatnonzero(column[chain] >= 0)
            grid = np.full((int(lengths[0]), end), -1)
            grid[step[places], column[chain[places]]] = places
            slot[places] = first + step[places] * end + column[chain[places]]
            groups.append(np.where(grid < 0, grid[0], grid))
            first, waiting = first + grid.size, waiting[end:]
        slot_of_row = np.empty_like(slot)
        slot_of_row[self.row] = slot
        return PaddedChains(groups, slot_of_row)

    def split_levels(self, max_nodes: int, *, by_arity: bool) -> list[Piece]:
        """The levels in their order, leaves first, in pieces of at most `max_nodes`; `by_arity`: of equal arity."""
        ends = [*range(max_nodes, self.num_leaves, max_nodes), self.num_leaves]
        pieces = [Piece(slice(begin, end), slice(0, 0), 0) for begin, end in zip([0, *ends], ends, strict=False)]
        if not self.num_inner:
            return pieces
        starts = self.level_start[:-1]
        if by_arity:
            starts = np.union1d(starts, 1 + np.flatnonzero(np.diff(self.arity)))
        nth = np.arange(self.num_inner)
        nth -= starts[np.searchsorted(starts, nth, side="right") - 1]  # within its piece, before it is cut
        cuts = np.append(np.flatnonzero(nth % max_nodes == 0), self.num_inner)
        edges, first = self.first_edge[cuts].tolist(), self.arity[cuts[:-1]].tolist()
        same = np.maximum.reduceat(self.arity, cuts[:-1]) == np.minimum.reduceat(self.arity, cuts[:-1])
        places = (cuts + self.num_leaves).tolist()
        for index, (begin, end) in enumerate(pairwise(places)):
            arity = first[index] if same[index] else None
            pieces.append(Piece(slice(begin, end), slice(edges[index], edges[index + 1]), arity))
        return pieces


@dataclass(frozen=True, eq=False)
class PaddedChains:
    """Chains as steps of sequences, from leaf to root, in groups of which at most half is padding.

    groups: for each the places of its nodes, [steps, chains]; behind a chain's root its leaf again
    slots:  [N] of each output row the step, in the groups one after the other, each read row by row
    """

    groups: list[Ints]
    slots: Ints


@dataclass(frozen=True)
class Piece:
    """Nodes that are computed at once: their places, the edges to their children, and how many children each has.

    arity: 0 for leaves; None where the nodes differ
    """

    places: slice
    edges: slice
    arity: int | None


def plan_forest(sizes: Ints, parents: Ints, max_depth: int = MAX_DEPTH) -> TreePlan:
    """Plan trees from the parent of each node.

    sizes:   [T] nodes of each tree
    parents: [N] within its tree; -1: the root. Siblings are children in the order of their numbers

    Raises TreeError naming tree and node for what is not a tree, or is deeper than `max_depth`.
    """
    return _cached(lambda: _plan_forest(sizes, parents, max_depth), b"forest", sizes, parents, max_depth)


def plan_graphs(sizes: Ints, edge_sizes: Ints, children: Ints, parents: Ints, max_depth: int = MAX_DEPTH) -> TreePlan:
    """Plan DAGs from their edges, each with one root.

    sizes, edge_sizes: [T] nodes and edges of each graph
    children, parents: [E] of each edge, within its graph. The edges of a parent are its children, in this order

    Raises TreeError naming tree and node for a cycle, several roots, nodes that are not there, or too great a depth.
    """
    return _cached(
        lambda: _plan_graphs(sizes, edge_sizes, children, parents, max_depth),
        *(b"graphs", sizes, edge_sizes, children, parents, max_depth),
    )


def _plan_forest(sizes: Ints, parents: Ints, max_depth: int) -> TreePlan:
    trees = _Numbering(sizes)
    N = trees.num_nodes
    _require_within(trees, parents, "its parent", lowest=-1)
    is_root = parents < 0
    parent = np.where(is_root, N, parents + trees.first_of_node)  # N stands above every root
    height, up, step = np.zeros(N + 1, np.int64), np.append(parent, N), 1
    while (below := np.flatnonzero(up < N)).size:  # up: the ancestor `step` edges above
        if step > N:
            raise trees.error(int(up[below[0]]), "is on a cycle", "a tree has none")
        np.maximum.at(height, up[below], height[below] + step)
        up, step = up[up], 2 * step
    height = height[:N]
    trees.require_one_root(np.flatnonzero(is_root))
    _require_depth(trees, height, max_depth)
    arity = np.bincount(parent, minlength=N + 1)[:N]
    by_level = np.lexsort((arity, height))  # stable: then by node
    num_leaves = int(np.searchsorted(height[by_level], 1))
    inner = by_level[num_leaves:]
    place = np.full(N + 1, N)
    place[inner] = np.arange(len(inner))
    node_of_row = np.argsort(place[parent], kind="stable")  # roots last, in the order of their trees
    leaves = node_of_row[height[node_of_row] == 0]  # in the order of their parents
    order = np.concatenate([leaves, inner])
    row_of_node = np.empty(N, np.int64)
    row_of_node[node_of_row] = np.arange(N)
    return TreePlan(
        sizes=trees.sizes,
        num_leaves=num_leaves,
        order=order,
        row=row_of_node[order],
        arity=arity[inner],
        level_start=_level_starts(height[inner]),
        child_row=None,
        root_row=np.arange(N - len(sizes), N),
    )


def _plan_graphs(sizes: Ints, edge_sizes: Ints, children: Ints, parents: Ints, max_depth: int) -> TreePlan:
    graphs = _Numbering(sizes)
    N = graphs.num_nodes
    graph_of_edge = np.repeat(np.arange(len(sizes)), edge_sizes)
    for name, ends in (("child", children), ("parent", parents)):
        bad = np.flatnonzero((ends < 0) | (ends >= sizes[graph_of_edge]))
        if bad.size:
            problem = f"is missing: an edge has it as its {name}, and there are {sizes[graph_of_edge[bad[0]]]} nodes"
            raise TreeError(int(graph_of_edge[bad[0]]), int(ends[bad[0]]), problem)
    child, parent = (ends + graphs.first_of_tree[graph_of_edge] for ends in (children, parents))
    arity = np.bincount(parent, minlength=N)
    height = _compute_heights(graphs, child, parent, arity, max_depth)
    roots = np.flatnonzero(np.bincount(child, minlength=N) == 0)
    graphs.require_one_root(roots)
    order = np.lexsort((arity, height))
    num_leaves = int(np.searchsorted(height[order], 1))
    place = np.empty(N, np.int64)
    place[order] = np.arange(N)
    by_parent = np.argsort(place[parent], kind="stable")
    inner = order[num_leaves:]
    return TreePlan(
        sizes=graphs.sizes,
        num_leaves=num_leaves,
        order=order,
        row=np.arange(N),
        arity=arity[inner],
        level_start=_level_starts(height[inner]),
        child_row=place[child][by_parent],
        root_row=place[roots],
    )


def _compute_heights(graphs: _Numbering, child: Ints, parent: Ints, arity: Ints, max_depth: int) -> Ints:
    """[N]: the longest way from each node down to a leaf; level by level, each edge is looked at once."""
    by_child = np.argsort(child, kind="stable")
    above = parent[by_child]
    first = np.append(0, np.cumsum(np.bincount(child, minlength=graphs.num_nodes)))
    height, waiting = np.zeros(graphs.num_nodes, np.int64), arity.copy()
    ready, num_done, level = np.flatnonzero(arity == 0), 0, 0
    while ready.size:
        if level > max_depth:
            raise _depth_error(graphs, int(ready[0]), max_depth)
        height[ready], num_done, level = level, num_done + ready.size, level + 1
        counts = first[ready + 1] - first[ready]
        offsets = np.repeat(first[ready] - np.append(0, np.cumsum(counts)[:-1]), counts)
        reached = above[offsets + np.arange(counts.sum())]
        np.subtract.at(waiting, reached, 1)
        ready = np.unique(reached[waiting[reached] == 0])
    if num_done < graphs.num_nodes:
        down, stuck = np.arange(graphs.num_nodes), waiting[child] > 0  # nodes on a cycle, or above one
        down[parent[stuck]] = child[stuck]
        for _ in range(graphs.num_nodes.bit_length()):  # to a node more than N edges below
            down = down[down]
        raise graphs.error(int(down[np.flatnonzero(waiting)[0]]), "is on a cycle", "a DAG has none")
    return height


class _Numbering:
    """Nodes numbered through all trees, and the errors that name them within theirs."""

    def __init__(self, sizes: Ints) -> None:
        if not len(sizes):
            raise TreeError(None, None, "the batch has no trees")
        if (sizes < 1).any():
            raise TreeError(int(np.argmax(sizes < 1)), None, "has no nodes")
        self.sizes, self.num_nodes = sizes.copy(), int(sizes.sum())
        self.first_of_tree = np.cumsum(sizes) - sizes
        self.tree_of_node = np.repeat(np.arange(len(sizes)), sizes)
        self.first_of_node = self.first_of_tree[self.tree_of_node]

    def error(self, node: int, problem: str, remedy: str = "") -> TreeError:
        return TreeError(int(self.tree_of_node[node]), int(node - self.first_of_node[node]), problem, remedy)

    def require_one_root(self, roots: Ints) -> None:
        counts = np.bincount(self.tree_of_node[roots], minlength=len(self.sizes))
        bad = np.flatnonzero(counts > 1)  # none at all: there is a cycle
        if bad.size:
            second = roots[self.tree_of_node[roots] == bad[0]][1]
            raise self.error(int(second), "is a second root", "put a node above both, or give two trees")


def _require_within(trees: _Numbering, ends: Ints, what: str, lowest: int) -> None:
    sizes = trees.sizes[trees.tree_of_node]
    bad = np.flatnonzero((ends < lowest) | (ends >= sizes))
    if bad.size:
        node = int(bad[0])
        raise trees.error(node, f"{what}, node {ends[node]}, is missing: there are {sizes[node]} nodes")


def _require_depth(trees: _Numbering, height: Ints, max_depth: int) -> None:
    bad = np.flatnonzero(height > max_depth)
    if bad.size:
        node = int(bad[np.argmax(height[bad])])
        raise _depth_error(trees, node, max_depth, int(height[node]))


def _depth_error(trees: _Numbering, node: int, max_depth: int, depth: int | None = None) -> TreeError:
    problem = f"has {depth or f'more than {max_depth}'} levels below it: more than max_depth = {max_depth}"
    return trees.error(node, problem, "raise max_depth if such trees are meant")


def _level_starts(heights: Ints) -> Ints:
    """[levels above the leaves + 1], from the ascending heights of the inner nodes."""
    return np.append(0, np.cumsum(np.bincount(heights)[1:])) if len(heights) else np.zeros(1, np.int64)


# -- plans of batches that come again: those of an evaluation, or of an endpoint that checks and then computes


class _PlanCache:
    """The least recently used plans are dropped beyond `max_bytes`. For any threads."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.clear()

    def clear(self) -> None:
        self._lock = Lock()
        self._plans: OrderedDict[bytes, TreePlan] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._plans)

    def get_or_make(self, key: bytes, make: Callable[[], TreePlan]) -> TreePlan:
        with self._lock:
            if key in self._plans:
                self._plans.move_to_end(key)
                return self._plans[key]
        plan = make()
        with self._lock:
            if key in self._plans:  # another thread was first
                return self._plans[key]
            self._plans[key] = plan
            self.size_bytes += _size_bytes(plan)
            while len(self._plans) > 1 and self.size_bytes > self.max_bytes:
                self.size_bytes -= _size_bytes(self._plans.popitem(last=False)[1])
        return plan


_plans = _PlanCache(_CACHE_BYTES)
os.register_at_fork(after_in_child=_plans.clear)  # another thread may have held the lock


def _cached(make: Callable[[], TreePlan], *key: bytes | Ints | int) -> TreePlan:
    """The plan of the same shapes, or a new one."""
    digest = hashlib.blake2b(digest_size=16)
    for part in key:
        data = part.tobytes() if isinstance(part, np.ndarray) else part if isinstance(part, bytes) else b"%d" % part
        digest.update(b"%d:" % len(data) + data)
    name = digest.digest()
    return _plans.get_or_make(name, make)


def _size_bytes(plan: TreePlan) -> int:
    """With what is computed later, and some for the objects themselves."""
    num_edges = plan.num_nodes - plan.num_trees if plan.child_row is None else len(plan.child_row)
    return 4096 + 8 * (8 * plan.num_nodes + 3 * plan.num_inner + 2 * num_edges + 4 * plan.num_trees)
