"""Tree-LSTMs in DyNet with its automatic batching (arXiv:1705.07860), on the trees and weights of a file.

    python -m benchmarks.peers.dynet_trees binary.npz binary

Runs in .venv-dynet. The second word is binary or child-sum. For each command it builds the graph of all trees, runs it
forward and backward, and says the processor seconds of each, the loss, and the sum of the squares of U's gradient. A
node has one product for all gates: one for each gate, as in DyNet's own example, would be more and smaller ones.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import dynet_config

dynet_config.set(mem=3000, autobatch=1)

import dynet as dy  # noqa: E402

from benchmarks.talk import commands, say  # noqa: E402
from benchmarks.trees.forests import HIDDEN as H  # noqa: E402
from benchmarks.trees.forests import Forest, Weights, load  # noqa: E402


class TreeLSTM:
    """The equations of arXiv:1503.00075, with the weights of `benchmarks.trees.forests.Weights`."""

    def __init__(self, weights: Weights, is_binary: bool) -> None:
        self._is_binary = is_binary
        self._model = model = dy.ParameterCollection()  # DyNet frees the parameters with it
        w = weights.U.shape[1]
        self._embedding = model.lookup_parameters_from_numpy(weights.embedding)
        self.below = [model.parameters_from_numpy(part) for part in (weights.U[:w], weights.U[w:])]
        self._into = [
            model.parameters_from_numpy(part) for part in (weights.W[:H], weights.b[:H], weights.W[H:], weights.b[H:])
        ]

    def root(self, tokens: list[int], children: list[list[int]]) -> Any:
        """h of node 0. Nodes are in preorder: from the last one back, children come before their parents."""
        states: list[Any] = [None] * len(tokens)
        of_f, of_gates = self.below
        W_f, b_f, W, b = self._into
        for node in range(len(tokens) - 1, -1, -1):
            x = dy.lookup(self._embedding, tokens[node])
            below = [states[child] for child in children[node]]
            if not below:
                states[node] = self._finish(dy.affine_transform([b, W, x]), None)
                continue
            h = [state[0] for state in below]
            forget = dy.affine_transform([b_f, W_f, x])
            if self._is_binary:
                both = dy.concatenate(h)
                f = of_f * both
                kept = [
                    dy.cmult(dy.logistic(forget + dy.pick_range(f, k * H, (k + 1) * H)), state[1])
                    for k, state in enumerate(below)
                ]
                gates = dy.affine_transform([b, W, x, of_gates, both])
            else:
                kept = [dy.cmult(dy.logistic(forget + of_f * state[0]), state[1]) for state in below]
                gates = dy.affine_transform([b, W, x, of_gates, dy.esum(h)])
            states[node] = self._finish(gates, dy.esum(kept))
        return states[0][0]

    @staticmethod
    def _finish(gates: Any, kept: Any) -> tuple[Any, Any]:
        sigmoid = dy.logistic(dy.pick_range(gates, 0, 2 * H))
        c = dy.cmult(dy.pick_range(sigmoid, 0, H), dy.tanh(dy.pick_range(gates, 2 * H, 3 * H)))
        c = c if kept is None else c + kept
        return dy.cmult(dy.pick_range(sigmoid, H, 2 * H), dy.tanh(c)), c


def run(model: TreeLSTM, forest: Forest, children: list[list[list[int]]]) -> dict[str, float]:
    began_s = time.process_time()
    dy.renew_cg()
    roots = [model.root(tokens.tolist(), below) for tokens, below in zip(forest.tokens, children, strict=True)]
    loss = dy.esum([dy.squared_norm(root) for root in roots])
    built_s = time.process_time()
    value = loss.value()
    forward_s = time.process_time()
    loss.backward()
    ended_s = time.process_time()
    norm = sum(float((part.grad_as_array() ** 2).sum()) for part in model.below)
    for part in model.below:
        part.scale_gradient(0.0)
    return {
        "seconds": ended_s - began_s,
        "build_s": built_s - began_s,
        "forward_s": forward_s - built_s,
        "loss": float(value),
        "gradient": norm,
    }


def main(path: str, kind: str) -> None:
    forest, weights = load(Path(path))
    model, children = TreeLSTM(weights, kind == "binary"), forest.children
    for _ in commands():
        say(**run(model, forest, children))


if __name__ == "__main__":
    main(*sys.argv[1:])
