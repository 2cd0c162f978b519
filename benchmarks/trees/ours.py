"""One process that runs every torch side once for each command, so that sides take turns on the same core and caches.

    python -m benchmarks.trees.ours FOLDER

FOLDER has binary.npz and child-sum.npz. A run plans, computes forward, and differentiates the sum of the squares of the
roots' outputs by the embedding and all weights; it says the loss, the squared norm of U's gradient, and its processor
seconds, in which neighbours count less than on the clock: there is one thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pack_sequence, pad_sequence

from benchmarks.talk import commands, say
from benchmarks.trees.forests import HIDDEN, NUM_LEAVES, NUM_TREES, VOCABULARY, Forest, load
from benchmarks.trees.models import GatedCell, Levels, lstm_by_levels, recurse_gated, recurse_lstm
from shoal.libs.trees import Cell, ChildSumLSTMCell, NaryLSTMCell, TreeBatch, TreeRNN
from shoal.libs.trees import planner as planning

Roots = Callable[[], Tensor]  # the outputs of the roots, from trees that are not planned yet


class Timed:
    """What is run and differentiated: `roots` by `by`."""

    def __init__(self, roots: Roots, by: list[Tensor]) -> None:
        self._roots, self._by = roots, by

    def run(self) -> dict[str, float]:
        planning._plans.clear()  # so that every run plans
        began_s = time.process_time()
        loss = self._roots().square().sum()
        gradients = torch.autograd.grad(loss, self._by)
        seconds = time.process_time() - began_s
        return {"seconds": seconds, "loss": loss.item(), "gradient": float(gradients[-1].square().sum())}


def by_engine(
    cell: Cell, forest: Forest, embedding: Tensor, *, by_levels: bool = False, compile_cell: bool = False
) -> Timed:
    """`TreeRNN(cell)`; `by_levels`: also where the cell has a function of its own."""
    rnn = TreeRNN(cell, compile=compile_cell)
    own = type(cell).run_batch

    def roots() -> Tensor:
        trees = TreeBatch.from_parents(forest.parents, inputs={"token": forest.tokens})
        x = F.embedding(trees.inputs["token"], embedding)
        cell.run_batch = (lambda x, plan: None) if by_levels else partial(own, cell)  # type: ignore[method-assign]
        return trees.roots(rnn(x, trees))

    return Timed(roots, [embedding, *cell.parameters()])


def tree_lstms(path: Path, kind: str) -> dict[str, Timed]:
    """Four ways of one Tree-LSTM, with equal weights."""
    forest, arrays = load(path)
    embedding, W, b, U = weights = [torch.from_numpy(each).requires_grad_() for each in vars(arrays).values()]
    cell = NaryLSTMCell(HIDDEN, HIDDEN) if kind == "binary" else ChildSumLSTMCell(HIDDEN, HIDDEN)
    cell.input.weight, cell.input.bias, cell.below.weight = map(nn.Parameter, (W, b, U))
    children = forest.children

    def recursion() -> Tensor:
        x_of = (F.embedding(torch.from_numpy(tokens), embedding) for tokens in forest.tokens)
        return torch.cat([recurse_lstm(x, W, b, U, below) for x, below in zip(x_of, children, strict=True)])

    def plain_levels() -> Tensor:
        trees = TreeBatch.from_parents(forest.parents, inputs={"token": forest.tokens})
        return lstm_by_levels(F.embedding(trees.inputs["token"], embedding), W, b, U, Levels.of(trees.plan))

    return {
        f"{kind}/own": by_engine(cell, forest, embedding),
        f"{kind}/levels": by_engine(cell, forest, embedding, by_levels=True),
        f"{kind}/plain levels": Timed(plain_levels, weights),
        f"{kind}/recursion": Timed(recursion, weights),
    }


def user_cell() -> dict[str, Timed]:
    forest, embedding = Forest.random(NUM_TREES, NUM_LEAVES), random_embedding()
    cell, children = GatedCell(HIDDEN, HIDDEN), forest.children

    def recursion() -> Tensor:
        x_of = (F.embedding(torch.from_numpy(tokens), embedding) for tokens in forest.tokens)
        return torch.cat([recurse_gated(x, cell, below) for x, below in zip(x_of, children, strict=True)])

    return {
        "user/own": by_engine(cell, forest, embedding),
        "user/recursion": Timed(recursion, [embedding, *cell.parameters()]),
    }


def chains(name: str, lengths: list[int]) -> dict[str, Timed]:
    """As trees of one child each, and as sequences of `nn.LSTM`: a sequence begins at the leaf, the last node."""
    forest, embedding = Forest.chains(lengths), random_embedding()
    lstm = nn.LSTM(HIDDEN, HIDDEN)
    steps = [torch.from_numpy(tokens[::-1].copy()) for tokens in forest.tokens]

    lasts = torch.tensor(lengths) - 1

    def by_lstm() -> Tensor:
        outputs, _ = lstm(F.embedding(pad_sequence(steps), embedding))
        return outputs[lasts, torch.arange(len(lasts))]  # type: ignore[no-any-return]

    def by_packed() -> Tensor:
        packed = pack_sequence(steps, enforce_sorted=False)
        _, (h, _) = lstm(packed._replace(data=F.embedding(packed.data, embedding)))
        return h[0]  # type: ignore[no-any-return]

    return {
        f"{name}/own": by_engine(ChildSumLSTMCell(HIDDEN, HIDDEN), forest, embedding),
        f"{name}/lstm": Timed(by_lstm, [embedding, *lstm.parameters()]),
        f"{name}/packed": Timed(by_packed, [embedding, *lstm.parameters()]),
    }


def grow(num_trees: int, num_leaves: int, form: str) -> Timed:
    """`form`: own (the function of the child-sum cell), user (a user's cell level by level)."""
    cell = ChildSumLSTMCell(HIDDEN, HIDDEN) if form == "own" else GatedCell(HIDDEN, HIDDEN)
    return by_engine(cell, Forest.random(num_trees, num_leaves), random_embedding())


def random_embedding() -> Tensor:
    return torch.randn(VOCABULARY, HIDDEN).requires_grad_()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    known: dict[str, Timed] = {}

    def find(command: dict[str, Any]) -> Timed:
        name = command["name"]
        if name not in known:
            match name.partition("/")[0]:
                case "binary" | "child-sum" as kind:
                    known.update(tree_lstms(folder / f"{kind}.npz", kind))
                case "user":
                    known.update(user_cell())
                case "chains":
                    known.update(chains(name.rpartition("/")[0], command["lengths"]))
                case _:
                    known.clear()  # the one before is not asked for again
                    known[name] = grow(command["trees"], command["leaves"], command["form"])
        return known[name]

    for command in commands():
        say(**find(command).run())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
