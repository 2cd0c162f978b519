"""What `shoal plan` says of each plan, beside an earlier commit: the same memory and bytes, and the same order.

    python -m benchmarks.plans_before [--before REVISION] [--runs N] [--quick]

Each tree plans three Tasks with its own code, for two and for four devices, in turns. Where a pipeline is cut follows
measured times, so memory and bytes of a plan are compared over the runs, and the nearest two count. Times are measured
on this machine, so two plans have an order where they differ by more than 20% in both trees.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.before import checkout
from benchmarks.children import OUR_PYTHON, ROOT, scratch
from benchmarks.plan_order import DIFFERENCE, TASKS
from benchmarks.result import Row, options, spread, write

BEFORE = "827fae60"
DEVICES = (2, 4)
TOLERANCE = 0.01
Plan = dict[str, Any]


def predict(tree: Path, task: str, devices: int, home: Path) -> dict[str, Plan]:
    """The possible plans by their names."""
    words = ["-m", "shoal", "plan", task, *TASKS[task], "sync.every=10", f"devices={devices}", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(tree / "platform"), "SHOAL_HOME": str(home)}
    text = subprocess.run(
        [OUR_PYTHON, *words], cwd=tree, env=environment, capture_output=True, text=True, check=True, timeout=600
    )
    return {plan["plan"]: plan for plan in json.loads(text.stdout)["plans"] if plan["is_possible"]}


def differ(one: float | None, other: float | None) -> float:
    """By how much of the larger one."""
    if not one or not other:
        return float(one != other)
    return abs(one - other) / max(one, other)


def compare(ours: list[dict[str, Plan]], before: list[dict[str, Plan]]) -> dict[str, Any]:
    """One Task and number of devices: the largest difference of bytes, and pairs of plans whose order has changed."""
    names = sorted(set(ours[0]) & set(before[0]))
    bytes_off = {
        f"{name}, {field}": off
        for name in names
        for field in ("memory_bytes", "server_bytes", "sent_bytes")
        if (off := min(differ(one[name][field], other[name][field]) for one in ours for other in before)) > TOLERANCE
    }
    times = [
        {name: statistics.median(float(run[name]["step_s"]) for run in side) for name in names}
        for side in (ours, before)
    ]
    turned = [
        f"{one} / {other}"
        for one, other in itertools.combinations(names, 2)
        if all(differ(side[one], side[other]) > DIFFERENCE for side in times)
        and (times[0][one] < times[0][other]) != (times[1][one] < times[1][other])
    ]
    only = sorted(set(ours[0]) ^ set(before[0]))
    return {"plans": len(names), "bytes_off": bytes_off, "turned": turned, "only_one_tree": only}


def main() -> None:
    chosen = options(__doc__, runs=3, before=BEFORE)
    found: dict[str, Any] = {}
    with scratch() as folder, checkout(chosen.before, folder) as package:
        for task, devices in itertools.product(TASKS, DEVICES):
            sides: dict[Path, list[dict[str, Plan]]] = {ROOT: [], package.parent: []}
            for run in range(chosen.runs):
                for tree in list(sides) if run % 2 else reversed(list(sides)):
                    sides[tree].append(predict(tree, task, devices, folder))
            found[f"{Path(task).stem}, {devices}"] = compare(*sides.values())
            print(task, devices, found[f"{Path(task).stem}, {devices}"], flush=True)
    total = sum(each["plans"] for each in found.values())
    wrong = sum(len(each["bytes_off"]) + len(each["turned"]) + len(each["only_one_tree"]) for each in found.values())
    runs = {"ours": spread([float(wrong)]), "found": found}
    note = f"{total} plans of {len(TASKS)} Tasks; bytes within {TOLERANCE:.0%}"
    row = Row(
        "`shoal plan` beside an earlier commit: what differs",
        "",
        float(wrong),
        None,
        None,
        None,
        0.0,
        "value",
        "lower",
        runs,
        note,
    )
    write("plans_before", [row], chosen.results)


if __name__ == "__main__":
    main()
