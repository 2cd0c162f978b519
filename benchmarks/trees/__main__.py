"""Models over trees beside recursion, DyNet and `nn.LSTM`, and what a node costs as trees and batches grow.

    python -m benchmarks.trees [--runs N] [--quick]

One thread, H = 150, float32. Each run plans, computes forward and differentiates by the embedding and all weights; its
processor time counts. Sides take turns: torch's in one process (`ours`), DyNet's in another
(`benchmarks.peers.dynet_trees`), on the same trees with the same weights; loss and gradient have to agree. Costs also
go to docs/pictures/trees.json.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.children import DYNET_PYTHON, OUR_PYTHON, ROOT, Child, scratch
from benchmarks.result import RESULTS, Row, compare, options, write
from benchmarks.trees.forests import NUM_LEAVES, NUM_TREES, Forest, Weights, save
from shoal.libs.trees.blas import find_fastest_product

DATA = ROOT / "docs" / "pictures" / "trees.json"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
PEERS = {
    "recursion": ("recursion", 18.0),
    "dynet": ("DyNet, automatic batching", 2.3),
    "levels": ("the same engine, autograd per level", 1.6),
    "plain levels": ("plain torch, level by level", None),
}
TREE_SIZES = (5, 15, 50, 150, 500)  # leaves: 9 to 999 nodes, in batches of 64 trees
BATCH_SIZES = (1, 4, 16, 64, 256, 1024)  # trees of 20 leaves
FORMS = {"own": "child-sum Tree-LSTM, its own function", "user": "a user's cell, level by level"}


class Sides:
    """The processes, each started at its first run."""

    def __init__(self, folder: Path, closing: ExitStack) -> None:
        self._folder, self._closing = folder, closing
        self._children: dict[str, Child] = {}

    def run(self, name: str, **setting: Any) -> dict[str, float]:
        kind, _, form = name.partition("/")
        process = f"dynet {kind}" if form == "dynet" else "ours"
        if process not in self._children:
            words = [OUR_PYTHON, "-m", "benchmarks.trees.ours", str(self._folder)]
            if form == "dynet":
                words = [DYNET_PYTHON, "-m", "benchmarks.peers.dynet_trees", str(self._folder / f"{kind}.npz"), kind]
            self._children[process] = self._closing.enter_context(Child(words, self._folder, ONE_THREAD))
        return self._children[process].ask(300.0, name=name, **setting)


def take_turns(sides: Sides, names: Sequence[str], runs: int, **setting: Any) -> dict[str, list[float]]:
    """Seconds of each, after one run that does not count. All must have found the same loss and gradient."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for index in range(runs + 1):
        answers = {name: sides.run(name, **setting) for name in names}
        if index:
            for name, answer in answers.items():
                found[name].append(answer["seconds"])
        first = answers[names[0]]
        for name, answer in answers.items():
            same = [math.isclose(answer[key], first[key], rel_tol=1e-4) for key in ("loss", "gradient")]
            assert all(same) or name.endswith("/lstm"), f"{name} computes another model: {answer}, not {first}"
    return found


def tree_lstms(sides: Sides, folder: Path, runs: int) -> list[Row]:
    rows = []
    library = find_fastest_product(1).__name__.rpartition("_")[2]
    for kind in ("binary", "child-sum"):
        save(folder / f"{kind}.npz", Forest.random(NUM_TREES, NUM_LEAVES), Weights.random(kind == "binary"))
        found = take_turns(sides, [f"{kind}/own", *(f"{kind}/{peer}" for peer in PEERS)], runs)
        ours = found[f"{kind}/own"]
        own_ms = 1e3 * statistics.median(ours)
        note = (
            f"{own_ms:.0f} ms a batch; products by {library}; loss and gradients of all sides agree to 1e-4; "
            f"ratios of turns: {_ratios(found, kind)}"
        )
        title = f"{kind} Tree-LSTM, {NUM_TREES} trees of {NUM_LEAVES} leaves, planned, forward and backward"
        for peer, (name, bar) in PEERS.items():
            mine, theirs = (rates(side) for side in (ours, found[f"{kind}/{peer}"]))
            rows.append(compare(title, "trees/s", "higher", mine, theirs, name, bar, "ratio" if bar else None, note))
    return rows


def rates(seconds: list[float]) -> list[float]:
    """Trees a second."""
    return [NUM_TREES / each for each in seconds]


def _ratios(found: dict[str, list[float]], kind: str) -> str:
    """Medians and ranges over the turns, of each peer's time by ours."""
    ours = found[f"{kind}/own"]
    parts = []
    for peer, (name, _) in PEERS.items():
        ratios = [their / our for their, our in zip(found[f"{kind}/{peer}"], ours, strict=True)]
        parts.append(f"{name} {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")
    return "; ".join(parts)


def user_cell(sides: Sides, runs: int) -> list[Row]:
    found = take_turns(sides, ["user/own", "user/recursion"], runs)
    ours, theirs = map(rates, found.values())
    name = f"a user's cell, {NUM_TREES} trees of {NUM_LEAVES} leaves, planned, forward and backward"
    return [compare(name, "trees/s", "higher", ours, theirs, "recursion", 10.0, "ratio")]


def chains(sides: Sides, runs: int) -> list[Row]:
    draw = np.random.default_rng(0)
    lengths = {
        "1 chain of 2,000 nodes": [2000],
        "32 chains of 2,000 nodes": [2000] * 32,
        "32 chains of 1,000 to 2,000 nodes": sorted(draw.integers(1000, 2001, 32).tolist()),
    }
    rows = []
    for name, of_each in lengths.items():
        found = take_turns(sides, [f"chains/{name}/own", f"chains/{name}/lstm"], runs, lengths=of_each)
        ours, theirs = ([1e3 * seconds for seconds in side] for side in found.values())
        peer = "nn.LSTM" if len(set(of_each)) == 1 else "nn.LSTM, padded"
        rows.append(compare(f"{name}, planned, forward and backward", "ms", "lower", ours, theirs, peer, 1.2, "ratio"))
    return rows


def costs(sides: Sides, runs: int) -> tuple[list[Row], dict[str, Any]]:
    """Nanoseconds a node, as trees grow and as batches grow."""
    rows: list[Row] = []
    data: dict[str, Any] = {"trees grow": {}, "batches grow": {}}
    settings = [("trees grow", 64, leaves) for leaves in TREE_SIZES]
    settings += [("batches grow", trees, NUM_LEAVES) for trees in BATCH_SIZES]
    for what, trees, leaves in settings:
        nodes = 2 * leaves - 1
        for form, name in FORMS.items():
            setting = {"trees": trees, "leaves": leaves, "form": form}
            found = take_turns(sides, [f"grow {setting}"], runs, **setting)
            (seconds,) = found.values()
            each_ns = [1e9 * each / (trees * nodes) for each in seconds]
            rows.append(
                compare(f"{name}, batches of {trees:,} trees of {nodes:,} nodes", "ns a node", "lower", each_ns)
            )
            x = nodes if what == "trees grow" else trees
            data[what].setdefault(form, {})[x] = statistics.median(each_ns)
    return rows, data


def main() -> None:
    chosen = options(__doc__, runs=9)
    with scratch() as folder, ExitStack() as closing:
        sides = Sides(folder, closing)
        rows = tree_lstms(sides, folder, chosen.runs)
        rows += user_cell(sides, chosen.runs)
        rows += chains(sides, min(chosen.runs, 3))
        of_costs, data = costs(sides, min(chosen.runs, 3))
    write("trees", [*rows, *of_costs], chosen.results)
    if chosen.results == RESULTS:
        DATA.write_text(json.dumps(data, indent=1) + "\n")
        print(f"written to {DATA.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
