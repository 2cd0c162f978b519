"""Random trees with tokens and weights, the same for every side of a comparison. NumPy only: DyNet's side reads them.

Legend: T trees, N nodes of all trees, H hidden units, as many features of a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

HIDDEN, VOCABULARY = 150, 1000
NUM_TREES, NUM_LEAVES = 256, 20


@dataclass(frozen=True)
class Forest:
    """Trees as parent arrays (-1: the root), and a token for each node."""

    parents: list[np.ndarray]
    tokens: list[np.ndarray]

    @classmethod
    def random(cls, num_trees: int, num_leaves: int, max_arity: int = 2, seed: int = 0) -> Self:
        draw = np.random.default_rng(seed)
        parents = [random_tree(num_leaves, max_arity, draw) for _ in range(num_trees)]
        return cls(parents, [draw.integers(0, VOCABULARY, len(tree)) for tree in parents])

    @classmethod
    def chains(cls, lengths: list[int], seed: int = 0) -> Self:
        """Node 0 is the root; the leaf, which is the first step of a sequence, is the last node."""
        draw = np.random.default_rng(seed)
        return cls([np.arange(-1, n - 1) for n in lengths], [draw.integers(0, VOCABULARY, n) for n in lengths])

    @property
    def children(self) -> list[list[list[int]]]:
        """Of each tree, of each node, in ascending order."""
        below: list[list[list[int]]] = []
        for tree in self.parents:
            below.append([[] for _ in tree])
            for node, parent in enumerate(tree.tolist()):
                if parent >= 0:
                    below[-1][parent].append(node)
        return below

    @property
    def num_nodes(self) -> int:
        return sum(map(len, self.parents))


def random_tree(num_leaves: int, max_arity: int, draw: np.random.Generator) -> np.ndarray:
    """Parents, in preorder. An inner node's leaves are divided among 2 to `max_arity` children at uniform cuts."""
    parents: list[int] = []
    waiting = [(num_leaves, -1)]
    while waiting:
        leaves, parent = waiting.pop()
        node = len(parents)
        parents.append(parent)
        if leaves > 1:
            num_cuts = int(draw.integers(1, min(leaves, max_arity)))
            cuts = np.sort(draw.choice(np.arange(1, leaves), num_cuts, replace=False))
            waiting += [(size, node) for size in np.diff([0, *cuts, leaves]).tolist()]
    return np.array(parents)


@dataclass(frozen=True)
class Weights:
    """Of a Tree-LSTM: embedding [1000, H], W [4H, H], b [4H] in the gate order f i o u, and U [w + 3H, w].

    w is H for the child-sum one, 2H for the binary one: rows of f (H for each child), then i, o, u.
    """

    embedding: np.ndarray
    W: np.ndarray
    b: np.ndarray
    U: np.ndarray

    @classmethod
    def random(cls, is_binary: bool, seed: int = 1) -> Self:
        draw = np.random.default_rng(seed)
        width = (2 if is_binary else 1) * HIDDEN

        def uniform(*shape: int) -> np.ndarray:
            return draw.uniform(-(HIDDEN**-0.5), HIDDEN**-0.5, shape).astype(np.float32)

        embedding = draw.standard_normal((VOCABULARY, HIDDEN)).astype(np.float32)
        return cls(embedding, uniform(4 * HIDDEN, HIDDEN), uniform(4 * HIDDEN), uniform(width + 3 * HIDDEN, width))


def save(path: Path, forest: Forest, weights: Weights) -> None:
    sizes = np.array([len(tree) for tree in forest.parents])
    parents, tokens = np.concatenate(forest.parents), np.concatenate(forest.tokens)
    np.savez(path, sizes=sizes, parents=parents, tokens=tokens, **vars(weights))


def load(path: Path) -> tuple[Forest, Weights]:
    found = np.load(path)
    cuts = np.cumsum(found["sizes"])[:-1]
    forest = Forest(np.split(found["parents"], cuts), np.split(found["tokens"], cuts))
    return forest, Weights(found["embedding"], found["W"], found["b"], found["U"])
