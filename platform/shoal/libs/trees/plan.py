"""The order in which the nodes of a batch of trees or DAGs are computed, for all of them at once.

    level         leaves are level 0; another node is one above its highest child. Nodes of a level do not depend on
                  each other: a level is computed at once, for all trees
    input order   leaves first, then the inner nodes level by level, in a level by their number of children. What a
                  model reads of each node is in this order, so that a level reads a slice
    output order  for trees: the children of the first inner node in input order, of the second, ..., then the roots.
                  A child's row is its edge, so the children of a level are a slice too, and the roots are the last
                  rows. For DAGs, where a node may have several parents: the input order

Made by `planner`. Knows no tensors of torch, no cells and no features. Legend: T trees, N nodes, L leaves,
n = N - L inner nodes, E edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


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
        """The number of levels, with the leaves."""
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
        positions = np.empty_like(self.row)
        positions[self.row] = np.arange(self.num_nodes)
        return positions

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
    def chain_buckets(self) -> PaddedChains:
        """For trees whose nodes have at most one child: see there."""
        counts = np.append(self.num_leaves, np.diff(self.level_start))
        step = np.repeat(np.arange(len(counts)), counts)  # of each place: a node's level
        chain = self.tree_of_node[self.order]
        slot = np.empty_like(step)
        first = 0
        groups = []
        waiting = np.argsort(-self.sizes, kind="stable")  # longest first
        while waiting.size:
            lengths = self.sizes[waiting]
            is_wasteful = lengths[0] * np.arange(1, len(lengths) + 1) > 2 * np.cumsum(lengths)
            end = int(np.argmax(is_wasteful)) or len(lengths)
            column = np.full(self.num_trees, -1)
            column[waiting[:end]] = np.arange(end)
            positions = np.flatnonzero(column[chain] >= 0)
            grid = np.full((int(lengths[0]), end), -1)
            grid[step[positions], column[chain[positions]]] = positions
            slot[positions] = first + step[positions] * end + column[chain[positions]]
            groups.append(np.where(grid < 0, grid[0], grid))
            first, waiting = first + grid.size, waiting[end:]
        slot_of_row = np.empty_like(slot)
        slot_of_row[self.row] = slot
        return PaddedChains(groups, slot_of_row)

    def split_levels(self, max_nodes: int, *, by_arity: bool) -> list[Piece]:
        """The levels in their order, leaves first, in pieces of at most `max_nodes`; `by_arity`: of equal arity."""
        key = max_nodes, by_arity
        if key not in self._pieces:
            self._pieces[key] = self._split_levels(max_nodes, by_arity)
        return self._pieces[key]

    @cached_property
    def _pieces(self) -> dict[tuple[int, bool], list[Piece]]:
        """A plan serves many steps."""
        return {}

    def _split_levels(self, max_nodes: int, by_arity: bool) -> list[Piece]:
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
        positions = (cuts + self.num_leaves).tolist()
        for index, (begin, end) in enumerate(pairwise(positions)):
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
    """Nodes that are computed at once: their positions, the edges to their children, and how many children each has.

    arity: 0 for leaves; None where the nodes differ
    """

    positions: slice
    edges: slice
    arity: int | None
