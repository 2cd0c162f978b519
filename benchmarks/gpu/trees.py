"""Tree-LSTMs and a user's cell on a batch of trees, planned, forward and backward: beside recursion node by node.

`plain levels` is what one writes in torch with a gather for each level. Sides share weights; every run plans. Recursion
computes an eighth of the trees, which take as long each: one batch of all would take seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.gpu.turns import Setting, Turn, take_turns
from benchmarks.result import Row, compare
from benchmarks.trees.forests import HIDDEN, NUM_LEAVES, NUM_TREES, Forest, Weights
from benchmarks.trees.models import GatedCell, Levels, lstm_by_levels, recurse_gated, recurse_lstm
from benchmarks.trees.ours import Roots
from shoal.libs.trees import Cell, ChildSumLSTMCell, NaryLSTMCell, TreeBatch, TreeRNN
from shoal.libs.trees import planner as planning

FEWER = 8  # times as few trees for recursion


def differentiate(roots: Roots, by: list[Tensor]) -> Turn:
    """Plans afresh, computes, and differentiates the sum of squares of the roots' outputs."""

    def run() -> tuple[Tensor, ...]:
        planning._plans.clear()
        return torch.autograd.grad(roots().square().sum(), by)

    return run


def make_roots(cell: Cell, forest: Forest, embedding: Tensor) -> Roots:
    rnn = TreeRNN(cell)

    def roots() -> Tensor:
        trees = TreeBatch.from_parents(forest.parents, inputs={"token": forest.tokens})
        trees = trees.map_tensors(lambda each: each.to(embedding.device))
        return trees.roots(rnn(F.embedding(trees.inputs["token"], embedding), trees))

    return roots


def make_sides(kind: str, forest: Forest, device: torch.device) -> dict[str, Turn]:
    """ours, recursion, and for the Tree-LSTMs plain levels."""
    arrays = Weights.random(kind == "binary")
    weights = [torch.from_numpy(each).to(device).requires_grad_() for each in vars(arrays).values()]
    embedding, W, b, U = weights
    few = len(forest.parents) // FEWER
    children = forest.children[:few]

    def embed() -> Iterator[Tensor]:
        return (F.embedding(torch.from_numpy(tokens).to(device), embedding) for tokens in forest.tokens[:few])

    if kind == "gated":
        gated = GatedCell(HIDDEN, HIDDEN).to(device)
        by = [embedding, *gated.parameters()]

        def recur_gated() -> Tensor:
            return torch.cat([recurse_gated(x, gated, below) for x, below in zip(embed(), children, strict=True)])

        ours = differentiate(make_roots(gated, forest, embedding), by)
        return {"ours": ours, "recursion": differentiate(recur_gated, by)}
    cell = NaryLSTMCell(HIDDEN, HIDDEN) if kind == "binary" else ChildSumLSTMCell(HIDDEN, HIDDEN)
    cell.input.weight, cell.input.bias, cell.below.weight = map(nn.Parameter, (W, b, U))

    def recur() -> Tensor:
        return torch.cat([recurse_lstm(x, W, b, U, below) for x, below in zip(embed(), children, strict=True)])

    def plain_levels() -> Tensor:
        trees = TreeBatch.from_parents(forest.parents, inputs={"token": forest.tokens})
        levels = Levels.of(trees.plan)
        moved = Levels(levels.num_leaves, levels.pairs.to(device), levels.roots.to(device), levels.starts)
        return lstm_by_levels(F.embedding(trees.inputs["token"].to(device), embedding), W, b, U, moved)

    return {
        "ours": differentiate(make_roots(cell, forest, embedding), [embedding, *cell.parameters()]),
        "recursion": differentiate(recur, weights),
        "plain levels": differentiate(plain_levels, weights),
    }


def measure(setting: Setting) -> Iterator[Row]:
    num_trees = setting.choose(NUM_TREES, FEWER)
    forest = Forest.random(num_trees, setting.choose(NUM_LEAVES, 4))
    kinds = {"child-sum": "child-sum Tree-LSTM", "binary": "binary Tree-LSTM", "gated": "a user's cell"}
    for index, (kind, title) in enumerate(kinds.items()):
        sides = make_sides(kind, forest, setting.device)
        times = {name: 1 if name == "recursion" else setting.choose(10, 1) for name in sides}
        found = take_turns(sides, setting.until(1 / (len(kinds) - index)), times)
        counts = {name: num_trees // FEWER if name == "recursion" else num_trees for name in sides}
        rates = {name: [1e3 * counts[name] / ms for ms in taken] for name, taken in found.items()}
        for peer in list(sides)[1:]:
            name = f"{title}, batches of {num_trees} trees, forward and backward, one GPU"
            yield compare(name, "trees/s", "higher", rates["ours"], rates[peer], peer)
