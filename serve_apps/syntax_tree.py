"""Evaluate formulas of `and`, `or` and `not` with a Tree-LSTM over syntax trees, of any size in one batch.

    python serve_apps/syntax_tree.py train                            # ten seconds; registers syntax@champion
    shoal run serve_apps/syntax_tree.py                               # serves it until Ctrl-C
    shoal serve deploy serve_apps/syntax_tree.yaml                    # the same, and stays until `shoal serve delete`
    python serve_apps/syntax_tree_client.py "not (True and False) or False"

A request is a tree or several: `tokens` and `parents` [trees, nodes], padded with -1. Requests of different sizes share
a batch (`ragged: pad`), whose trees are computed level by level: see `shoal.libs.trees`. Rows that are no tree are
rejected before, by the preprocessing. serve_apps/trees.py serves syntax trees of Python.
"""

import ast
import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from shoal.cluster.job_main import job_main
from shoal.flows.serving import serve_models
from shoal.flows.serving_spec import ServingSpec, check, load_serving_spec
from shoal.libs.trees.syntax_tree import NO_NODE, TreeLSTM, pad_trees
from shoal.registry import ModelFactory, ModelVersion, Registry, Signature, TensorSignature
from shoal.weights import WeightSnapshot

TOKENS = ("True", "False", "And", "Or", "Not")
SIZE = {"num_tokens": len(TOKENS), "num_classes": 2, "width": 16, "hidden": 32}
STEPS, BATCH, DEPTH = 250, 64, 4


def tree_of(formula: str) -> list[tuple[int, int]]:
    """Token and parent of each node of a Python formula, the root first. Raises SyntaxError, ValueError."""
    nodes: list[tuple[int, int]] = []

    def visit(node: ast.expr, parent: int) -> None:
        match node:
            case ast.Constant(value=bool(value)):
                token, children = str(value), []
            case ast.BoolOp(op=op, values=children):
                token = type(op).__name__
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                token, children = "Not", [operand]
            case _:
                raise ValueError(f"{ast.unparse(node)!r} is none of True, False, and, or, not")
        nodes.append((TOKENS.index(token), parent))
        place = len(nodes) - 1
        for child in children:
            visit(child, place)

    visit(ast.parse(formula, mode="eval").body, NO_NODE)
    return nodes


def as_arrays(formulas: list[str]) -> dict[str, np.ndarray]:
    """Convert formulas to trees in the endpoint's format: int64 [formulas, nodes] each."""
    return pad_trees([tuple(zip(*tree_of(formula), strict=True)) for formula in formulas])


def formula(rng: random.Random, depth: int) -> str:
    """Generate a random formula of at most `depth` levels."""
    kind = rng.choice(["value", "and", "or", "not"]) if depth > 1 else "value"
    if kind == "value":
        return rng.choice(["True", "False"])
    if kind == "not":
        return f"(not {formula(rng, depth - 1)})"
    parts = [formula(rng, depth - 1) for _ in range(rng.randint(2, 3))]
    return f"({f' {kind} '.join(parts)})"


def train(steps: int = STEPS) -> ModelVersion:
    """Train on random formulas, and register the model."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # small matrices: a second thread costs more than it saves
    rng, module = random.Random(0), TreeLSTM(**SIZE)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(steps):
        formulas = [formula(rng, DEPTH) for _ in range(BATCH)]
        logits = module(*map(torch.from_numpy, as_arrays(formulas).values()))
        worth = torch.tensor([int(eval(each)) for each in formulas])
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits, worth).backward()
        optimizer.step()
    accuracy = float((logits.argmax(1) == worth).float().mean())
    weights = {name: value.numpy() for name, value in module.state_dict().items()}
    made = Registry().register(
        "syntax",
        WeightSnapshot.of(steps, weights),
        model=ModelFactory(factory="shoal.libs.trees.syntax_tree:TreeLSTM", kwargs=SIZE),
        signature=Signature(
            inputs=[TensorSignature(name=name, datatype="INT64", shape=[-1, -1]) for name in ("tokens", "parents")],
            outputs=[TensorSignature(name="logits", datatype="FP32", shape=[-1, 2])],
        ),
        metrics={"accuracy": accuracy},
    )
    print(f"registered {made.ref}: {accuracy:.0%} of the last formulas right")
    return made


def spec() -> ServingSpec:
    """The recipe, from the YAML file."""
    return load_serving_spec(Path(__file__).with_suffix(".yaml"))


if __name__ == "__main__":
    if sys.argv[1:] == ["train"]:
        train()
    else:
        job_main(spec(), serve_models, job="syntax_tree", check=check)
