"""A small request in JSON to an endpoint, beside the endpoint of an earlier commit, at 1, 16 and 64 connections.

    python -m benchmarks.serving.before [--before REVISION] [--runs N] [--quick]

Both are up at once, and take turns every few seconds, so that a machine whose speed drifts, or that others use, slows
both alike.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path

from benchmarks.before import checkout
from benchmarks.children import OUR_PYTHON, ROOT, Child, scratch
from benchmarks.result import compare, options, write
from benchmarks.serving.servers import OURS, START_TIMEOUT_S, Server
from benchmarks.serving.small import CONNECTIONS, METRICS, measure

BEFORE = "609ce98a"
BAR = 0.97


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
    chosen = options(__doc__, runs=9, before=BEFORE)
    found: dict[tuple[int, str, str], list[float]] = {}
    with scratch() as folder, checkout(chosen.before, folder) as before, ExitStack() as stack:
        sides = {
            side: start_endpoint(each, folder, stack) for side, each in (("own", ROOT / "platform"), ("before", before))
        }
        for run in range(chosen.runs):
            for num in CONNECTIONS:
                for side in sides if run % 2 else reversed(sides):
                    for metric, value in measure(sides[side], folder, num, 0.5 if chosen.quick else 1.2).items():
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
