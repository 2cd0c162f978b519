"""A small request in JSON to an endpoint, beside the endpoint of an earlier commit, at 1, 16 and 64 connections.

    python -m benchmarks.serving.before [--before REVISION] [--runs N] [--quick]

Both are up at once, and take turns every second, so that a machine whose speed drifts, or that others use, slows
both alike. Two processes of the same code differ by five per cent, so both are started several times, another first
each time.
"""

from __future__ import annotations

import itertools
import json
import os
from contextlib import ExitStack
from pathlib import Path

from benchmarks.before import checkout
from benchmarks.children import OUR_PYTHON, ROOT, Child, scratch
from benchmarks.result import compare, options, write
from benchmarks.serving.servers import OURS, START_TIMEOUT_S, Server
from benchmarks.serving.small import CONNECTIONS, METRICS, measure

BEFORE = "25c98970"
BAR = 0.97
STARTS = 4


def start_endpoint(package: Path, folder: Path, stack: ExitStack) -> Server:
    """The endpoint of a package, until the end of `stack`."""
    env = {"SHOAL_HOME": str(folder / f"home-{os.urandom(3).hex()}")}
    env["PYTHONPATH"] = os.pathsep.join([str(package), str(ROOT)])
    child = stack.enter_context(Child([OUR_PYTHON, "-m", "benchmarks.serving.ours", "mlp", "{}"], folder, env))
    said = child.answer(START_TIMEOUT_S)
    for process in child.processes("ray::ServeReplica"):
        assert process.environ()["PYTHONPATH"].startswith(str(package)), json.dumps(process.environ())
    return Server(OURS, "mlp", child, said["url"], said)


def main() -> None:
    chosen = options(__doc__, runs=8, before=BEFORE)
    found: dict[tuple[int, str, str], list[float]] = {}
    trees = {"own": ROOT / "platform"}
    with scratch() as folder, checkout(chosen.before, folder) as trees["before"]:
        for start in range(STARTS):
            with ExitStack() as stack:
                names = sorted(trees, reverse=start % 2 == 0)
                sides = {name: start_endpoint(trees[name], folder, stack) for name in names}
                for turn, num in itertools.product(range(chosen.runs), CONNECTIONS):
                    for side in sides if turn % 2 else reversed(sides):
                        for metric, value in measure(sides[side], folder, num, 0.5 if chosen.quick else 0.8).items():
                            found.setdefault((num, metric, side), []).append(value)
    rows = []
    for metric, word, unit, better in METRICS:
        for num in CONNECTIONS:
            name = f"small model, JSON, {word}, {num} connection{'s' if num > 1 else ''}"
            values = (found[num, metric, side] for side in ("own", "before"))
            bar = BAR if metric == "per_s" else None
            rows.append(
                compare(name, unit, better, *values, f"before ({chosen.before})", bar, "ratio" if bar else None)
            )
    write("serving_before", rows, chosen.results)


if __name__ == "__main__":
    main()
