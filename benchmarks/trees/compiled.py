"""Static or dynamic graphs: what a batch of trees costs by each, and what compiling costs when its shape changes.

    python -m benchmarks.trees.compiled [--quick]
    python -m benchmarks.trees.compiled FORM            # one form, in a process of its own

A binary Tree-LSTM (H = 150) and two users' cells, 256 trees of 20 leaves, every batch of new shapes, one thread,
forward and backward, planned where there is a plan. Times are the processor's, those of compilers included. Caches of
torch.compile are off; its first compilation in a process, which also starts the compiler, is done before on another
function.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.functional import embedding as look_up

from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.result import Row, compare, options, write
from benchmarks.talk import say
from benchmarks.trees.forests import HIDDEN, NUM_LEAVES, NUM_TREES, Forest
from benchmarks.trees.models import GatedCell, Levels, lstm_by_levels, recurse_lstm
from benchmarks.trees.ours import by_engine, random_embedding
from shoal.libs.trees import Cell, NaryLSTMCell, RecursiveTensorCell, TreeBatch

NUM_SHAPES = 2  # that are compiled, where each is
NUM_BATCHES = 10  # of new shapes, where a graph serves them all
COMPILED = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}


def processor_s() -> float:
    """Of this process, and of the compilers that it started."""
    return time.process_time() + sum(os.times()[2:4])


def seconds_of(run: Callable[[], Tensor], by: list[Tensor]) -> float:
    """Forward, and backward by the leaves in `by`."""
    began_s = processor_s()
    torch.autograd.grad(run().square().sum(), by)
    return processor_s() - began_s


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def warm_up() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    seconds_of(lambda: torch.compile(lambda x: (x @ x).tanh())(x), [x])


class LSTM:
    """A binary Tree-LSTM whose graph depends on the trees' shapes."""

    def __init__(self) -> None:
        self.cell, self.table = NaryLSTMCell(HIDDEN, HIDDEN), random_embedding()
        self.weights = [self.cell.input.weight, self.cell.input.bias, self.cell.below.weight]
        self.by = [self.table, *self.weights]

    def recursions(self, forest: Forest) -> list[Callable[[Callable[..., Tensor]], Tensor]]:
        """Of each tree, for `recurse_lstm` or what was compiled of it."""

        def of(tokens: Tensor, below: list[list[int]]) -> Callable[[Callable[..., Tensor]], Tensor]:
            return lambda recurse: recurse(look_up(tokens, self.table), *self.weights, below)

        tokens = [torch.from_numpy(each) for each in forest.tokens]
        return [of(*each) for each in zip(tokens, forest.children, strict=True)]


def recursion() -> dict[str, Any]:
    """Every tree a graph of its own, by autograd."""
    lstm, forest = LSTM(), Forest.random(NUM_TREES, NUM_LEAVES)
    trees = lstm.recursions(forest)
    run = lambda: torch.cat([tree(recurse_lstm) for tree in trees])  # noqa: E731
    return {"batch_s": [seconds_of(run, lstm.by) for _ in range(3)], "compile_s": [], "graphs": 0}


def compiled_recursion() -> dict[str, Any]:
    """Every tree a graph of its own, compiled; a batch is that of trees which come again."""
    lstm, forest = LSTM(), Forest.random(NUM_SHAPES, NUM_LEAVES)
    compile_s, tree_s = [], []
    for tree in lstm.recursions(forest):
        torch.compiler.reset()
        compiled = torch.compile(recurse_lstm, dynamic=False)
        run = lambda: tree(compiled)  # noqa: E731, B023
        first_s = seconds_of(run, lstm.by)
        again_s = statistics.median(seconds_of(run, lstm.by) for _ in range(20))
        compile_s.append(first_s - again_s)
        tree_s.append(again_s)
    return {"batch_s": [NUM_TREES * each for each in tree_s], "compile_s": compile_s, "graphs": NUM_SHAPES}


def compiled_batch() -> dict[str, Any]:
    """Each batch a graph of its own, level by level, compiled; a batch is one that comes again."""
    lstm = LSTM()
    compile_s, batch_s = [], []
    for seed in range(NUM_SHAPES):
        torch.compiler.reset()
        forest = Forest.random(NUM_TREES, NUM_LEAVES, seed=seed)
        trees = TreeBatch.from_parents(forest.parents, inputs={"token": forest.tokens})
        levels = Levels.of(trees.plan)
        compiled = torch.compile(partial(lstm_by_levels, levels=levels), dynamic=False)
        run = lambda: compiled(look_up(trees.inputs["token"], lstm.table), *lstm.weights)  # noqa: E731, B023
        first_s = seconds_of(run, lstm.by)
        again_s = statistics.median(seconds_of(run, lstm.by) for _ in range(5))
        compile_s.append(first_s - again_s)
        batch_s.append(again_s)
    return {"batch_s": batch_s, "compile_s": compile_s, "graphs": NUM_SHAPES}


def make_cell(name: str) -> Cell:
    match name:
        case "lstm":
            return NaryLSTMCell(HIDDEN, HIDDEN)
        case "gated":
            return GatedCell(HIDDEN, HIDDEN)
        case _:
            return RecursiveTensorCell(25)


def by_levels(name: str) -> dict[str, Any]:
    """A cell per level, eager and compiled, and its own function if it has one, in turns over batches of new shapes."""
    cell = make_cell(name)
    table = random_embedding() if name != "tensor" else torch.randn(1000, 25).requires_grad_()
    forms = {"levels": {"by_levels": True}, "compiled": {"by_levels": True, "compile_cell": True}}
    forms |= {"own": {}} if name == "lstm" else {}
    found: dict[str, dict[str, Any]] = {form: {"batch_s": [], "compile_s": []} for form in forms}
    before = num_graphs()
    for seed in range(NUM_BATCHES):
        forest = Forest.random(NUM_TREES, NUM_LEAVES, seed=seed)
        for form, how in forms.items():
            timed, graphs, began_s = by_engine(cell, forest, table, **how), num_graphs(), processor_s()
            timed.run()
            seconds = processor_s() - began_s
            found[form]["batch_s" if num_graphs() == graphs else "compile_s"].append(seconds)
    for each in found.values():
        each["graphs"] = 0
        each["compile_s"] = [seconds - statistics.median(each["batch_s"]) for seconds in each["compile_s"]]
    found["compiled"]["graphs"] = num_graphs() - before
    return found


ALONE: dict[str, Callable[[], dict[str, Any]]] = {
    "recursion": recursion,
    "compiled recursion": compiled_recursion,
    "compiled batch": compiled_batch,
}


# What each form is called, where its graph comes from, and for what a compilation serves.
FORMS = {
    ("recursion", ""): ("recursion, eager", ""),
    ("compiled recursion", ""): ("recursion, compiled for each tree shape", "one tree shape"),
    ("lstm", "levels"): ("a cell for each level, eager", ""),
    ("lstm", "compiled"): ("a cell for each level, compiled", "levels of any size"),
    ("compiled batch", ""): ("all levels, compiled for each batch shape", "one batch shape"),
    ("lstm", "own"): ("the cell's own function", ""),
}
USERS = {"gated": "GatedCell", "tensor": "RecursiveTensorCell(25)"}


def measure(form: str, folder: Path) -> dict[str, Any]:
    with Child([OUR_PYTHON, "-m", "benchmarks.trees.compiled", form], folder, COMPILED) as child:
        found: dict[str, Any] = child.answer(600.0)
    return found


def rows_of(name: str, serves: str, found: dict[str, Any]) -> list[Row]:
    """The time of a batch, and where the form compiles, seconds for each graph."""
    rows = [compare(f"binary Tree-LSTM, a batch by {name}", "ms", "lower", [1e3 * each for each in found["batch_s"]])]
    if found["compile_s"]:
        each_s = [sum(found["compile_s"]) / found["graphs"]] if found["graphs"] else found["compile_s"]
        note = f"{found['graphs']} graphs; each serves {serves}"
        rows.append(compare(f"compiling {name}, a graph", "s", "lower", each_s, note=note))
    return rows


def main() -> None:
    chosen = options(__doc__, runs=1)
    found: dict[tuple[str, str], dict[str, Any]] = {}
    with scratch() as folder:
        for form in ALONE:
            found[form, ""] = measure(form, folder)
        for cell in ("lstm", *USERS):
            found |= {(cell, form): each for form, each in measure(cell, folder).items()}
    rows = [row for key, words in FORMS.items() for row in rows_of(*words, found[key])]
    for cell, name in USERS.items():
        eager, compiled = found[cell, "levels"], found[cell, "compiled"]
        ours, theirs = ([1e3 * each for each in side["batch_s"]] for side in (compiled, eager))
        note = f"{compiled['graphs']} graphs, compiled in {sum(compiled['compile_s']):.0f} s, for {NUM_BATCHES} batches"
        title = f"{name} for each level, compiled, a batch of new shapes"
        rows.append(compare(title, "ms", "lower", ours, theirs, "eager", note=note))
    write("trees_compiled", rows, chosen.results)


def child(form: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warm_up()
    say(**(ALONE[form]() if form in ALONE else by_levels(form)))


if __name__ == "__main__":
    form = " ".join(sys.argv[1:2])
    main() if form.startswith("-") or not form else child(form)
