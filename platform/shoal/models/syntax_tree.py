"""A child-sum Tree-LSTM over syntax trees (Tai et al., arXiv:1503.00075, equations 2 to 8), many trees at a time.

Called by serve_apps/syntax_tree.py and by whoever trains one; `flatten` is the preprocessing of an endpoint.

Trees are batched level by level: all nodes of one depth, of all trees, are one matrix product, and only the level below
is carried to the next. So a batch costs as many steps as its deepest tree has levels, however many trees it holds.
Legend: B trees, N nodes of all trees, T nodes of the largest tree, L levels, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

NO_NODE = -1  # pads tokens and parents to the largest tree; as a parent: the root has none


def flatten(trees: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Trees of B rows as the levels of all of them, deepest first.

    tokens:  int64 [B, T], what each node is; NO_NODE where a tree has no more nodes
    parents: int64 [B, T], the place of each node's parent in its row; NO_NODE for the root

    Gives `tokens` [N] and `parents` [N], in which a parent is a place in the next level, and `levels` [L], the number
    of nodes in each; the last level is the B roots, in the order of the rows. Raises ValueError for what is not a tree.
    """
    tokens, parents = trees["tokens"], trees["parents"]
    if tokens.shape != parents.shape:
        raise ValueError(f"'parents' has the shape {[*parents.shape]}, 'tokens' has {[*tokens.shape]}")
    num_trees, size = tokens.shape
    exists = tokens >= 0
    _require(exists | (parents == NO_NODE), "'parents': a node that is not there (token -1) has a parent")
    _require((parents >= NO_NODE) & (parents < size), "'parents': a parent is outside of its tree")
    rows = np.arange(num_trees)[:, None]
    above = np.where(parents == NO_NODE, np.arange(size), parents)  # the root is above itself
    _require(exists[rows, above] | ~exists, "'parents': a parent is a node that is not there (token -1)")
    one_root = ((parents == NO_NODE) & exists).sum(1, keepdims=True) == 1
    _require(one_root, "'parents': a tree has exactly one root, whose parent is -1")
    depths, ends = _find_depths_and_roots(above, rows)
    _require(parents[rows, ends] == NO_NODE, "'parents': a cycle")

    order = np.lexsort((np.nonzero(exists)[0], -depths[exists]))  # by level, and in a level by tree
    flat_tokens, flat_depths = tokens[exists][order], depths[exists][order]
    levels = np.bincount(flat_depths)[::-1]
    starts = np.repeat(np.cumsum(levels) - levels, levels)
    places = np.full(tokens.shape, 0)
    found_rows, found_columns = (each[order] for each in np.nonzero(exists))
    places[found_rows, found_columns] = np.arange(len(order)) - starts
    flat_parents = places[found_rows, above[found_rows, found_columns]]
    return {"tokens": flat_tokens, "parents": flat_parents, "levels": levels.astype(np.int64)}


class TreeLSTM(nn.Module):
    """Trees, as `flatten` gives them, to logits [B, num_classes] of each. Tokens that it does not know share a row."""

    def __init__(self, num_tokens: int = 256, num_classes: int = 2, width: int = 64, hidden: int = 64) -> None:
        super().__init__()
        self.num_tokens, self.hidden = num_tokens, hidden
        self.token = nn.Embedding(num_tokens + 1, width)
        self.input = nn.Linear(width, 4 * hidden)  # of input gate, output gate, update, and forget gate
        self.below = nn.Linear(hidden, 3 * hidden, bias=False)  # of the sum of the children's states
        self.forget = nn.Linear(hidden, hidden, bias=False)  # of each child's state by itself
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, tokens: Tensor, parents: Tensor, levels: Tensor) -> Tensor:
        """tokens, parents [N], levels [L]: see `flatten`."""
        known = self.input(self.token(tokens.clamp(max=self.num_tokens)))
        gates_of, forget_of = known.split([3 * self.hidden, self.hidden], dim=1)
        states = cells = places = known.new_zeros(0)  # of the level below, and its parents' places
        start = 0
        for size in levels.tolist():
            level = slice(start, start + size)
            gates, memory = gates_of[level], known.new_zeros(())
            if start:
                gates = gates + self.below(_sum_children(states, places, size))
                forget = torch.sigmoid(forget_of[level][places] + self.forget(states))
                memory = _sum_children(forget * cells, places, size)
            write, read, update = gates.chunk(3, dim=1)
            cells = torch.sigmoid(write) * torch.tanh(update) + memory
            states = torch.sigmoid(read) * torch.tanh(cells)
            places = parents[level]
            start += size
        logits: Tensor = self.head(states)
        return logits


def _sum_children(children: Tensor, places: Tensor, size: int) -> Tensor:
    """The sum over the children of each of `size` parents."""
    return children.new_zeros(size, children.shape[1]).index_add(0, places, children)


def _find_depths_and_roots(above: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many parents are above each node, and which is the last: each step looks twice as far as the one before."""
    depths = (above != np.arange(above.shape[1])).astype(np.int64)
    for _ in range(above.shape[1].bit_length()):
        depths = depths + depths[rows, above]
        above = above[rows, above]
    return depths, above


def _require(holds: np.ndarray, problem: str) -> None:
    """`holds` [B, ...] for every tree. Raises ValueError naming the first one for which it does not."""
    if not holds.all():
        raise ValueError(f"{problem} (row {int(np.argmin(holds.reshape(len(holds), -1).all(1)))})")
