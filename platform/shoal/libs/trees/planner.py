"""Makes the plan of a batch of trees or DAGs, in NumPy for the whole batch, and checks them on the way.

Owns the errors that name tree and node, and the cache of plans by shape. Called by `TreeBatch`. Legend: see `plan`.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

import numpy as np

from shoal.errors import TreeError
from shoal.libs.trees.plan import Ints, TreePlan

MAX_DEPTH = 4096  # edges from a root to a leaf, unless the caller allows more
_CACHE_BYTES = 64 * 2**20


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
    own_sizes = trees.sizes[trees.tree_of_node]
    missing = np.flatnonzero((parents < -1) | (parents >= own_sizes))
    if missing.size:
        node = int(missing[0])
        problem = f"its parent, node {parents[node]}, is missing: there are {own_sizes[node]} nodes"
        raise trees.error(node, problem)
    is_root = parents < 0
    parent = np.where(is_root, N, parents + trees.first_of_node)  # N stands above every root
    height = np.zeros(N + 1, np.int64)
    up = np.append(parent, N)
    step = 1
    while (below := np.flatnonzero(up < N)).size:  # up: the ancestor `step` edges above
        if step > N:
            raise trees.error(int(up[below[0]]), "is on a cycle", "a tree has none")
        np.maximum.at(height, up[below], height[below] + step)
        up, step = up[up], 2 * step
    height = height[:N]
    trees.require_one_root(np.flatnonzero(is_root))
    deep = np.flatnonzero(height > max_depth)
    if deep.size:
        node = int(deep[np.argmax(height[deep])])
        raise _depth_error(trees, node, max_depth, int(height[node]))
    arity = np.bincount(parent, minlength=N + 1)[:N]
    by_level = np.lexsort((arity, height))  # stable: then by node
    num_leaves = int(np.searchsorted(height[by_level], 1))
    inner = by_level[num_leaves:]
    position = np.full(N + 1, N)
    position[inner] = np.arange(len(inner))
    node_of_row = np.argsort(position[parent], kind="stable")  # roots last, in the order of their trees
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
    position = np.empty(N, np.int64)
    position[order] = np.arange(N)
    by_parent = np.argsort(position[parent], kind="stable")
    inner = order[num_leaves:]
    return TreePlan(
        sizes=graphs.sizes,
        num_leaves=num_leaves,
        order=order,
        row=np.arange(N),
        arity=arity[inner],
        level_start=_level_starts(height[inner]),
        child_row=position[child][by_parent],
        root_row=position[roots],
    )


def _compute_heights(graphs: _Numbering, child: Ints, parent: Ints, arity: Ints, max_depth: int) -> Ints:
    """[N]: the longest way from each node down to a leaf; level by level, each edge is looked at once."""
    by_child = np.argsort(child, kind="stable")
    above = parent[by_child]
    first = np.append(0, np.cumsum(np.bincount(child, minlength=graphs.num_nodes)))
    height, waiting = np.zeros(graphs.num_nodes, np.int64), arity.copy()
    ready = np.flatnonzero(arity == 0)
    num_done = 0
    level = 0
    while ready.size:
        if level > max_depth:
            raise _depth_error(graphs, int(ready[0]), max_depth)
        height[ready] = level
        num_done = num_done + ready.size
        level = level + 1
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
    """Count also what is computed later, and some for the objects themselves."""
    num_edges = plan.num_nodes - plan.num_trees if plan.child_row is None else len(plan.child_row)
    return 4096 + 8 * (8 * plan.num_nodes + 3 * plan.num_inner + 2 * num_edges + 4 * plan.num_trees)
