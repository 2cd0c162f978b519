"""What trackers have while a run goes on, on a machine whose cores are all busy.

    python -m benchmarks.tracking_busy [--runs N] [--quick]

A run with `track=[mlflow,wandb]` logs ten values a second for 40 s, beside a loop on each core, each a session of its
own. MLflow writes its database, W&B its offline files. Counted: values that were handed over 45 s after the run began,
while it still runs; and when the first one was.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import shoal.runs
from benchmarks.children import scratch
from benchmarks.result import compare, options, write
from benchmarks.stream_restart import busy_loops
from shoal.libs.tracking import processes
from shoal.libs.tracking.follower import read_state

TRACKERS = ("mlflow", "wandb")
VALUES, PERIOD_S, AFTER_S, NUM_LOOPS = 400, 0.1, 45.0, 2
BAR = 0.75 * VALUES


def measure(folder: Path) -> dict[str, tuple[float, float]]:
    """Of each tracker: values handed over after AFTER_S, and seconds until the first; inf for none."""
    os.environ |= {"SHOAL_HOME": str(folder / "home"), "WANDB_MODE": "offline"}
    first_s = dict.fromkeys(TRACKERS, float("inf"))
    with busy_loops(NUM_LOOPS), shoal.runs.create("job", f"track: [{', '.join(TRACKERS)}]\n") as recorder:
        began_s = time.monotonic()
        while (at_s := time.monotonic() - began_s) < AFTER_S:
            if (number := int(at_s / PERIOD_S)) < VALUES:
                recorder.log(number, {"loss": 1 / (number + 1)})
            for name in TRACKERS:
                if read_state(recorder.folder, name).sent:
                    first_s[name] = min(first_s[name], at_s)
            time.sleep(PERIOD_S)
        found = {name: (float(read_state(recorder.folder, name).sent), first_s[name]) for name in TRACKERS}
    for process in processes._unfinished:
        process.kill()
        process.wait()
    return found


def main() -> None:
    chosen = options(__doc__, runs=3)
    found = []
    for _ in range(chosen.runs):
        with scratch() as folder:
            found.append(measure(folder))
        print(found[-1], flush=True)
    rows = []
    for name in TRACKERS:
        counts, first = ([each[name][index] for each in found] for index in (0, 1))
        seconds = ", ".join(f"{each:.0f}" for each in first)
        note = f"{NUM_LOOPS} loops on {os.cpu_count()} cores; the first after {seconds} s"
        what = f"{name}: values of {VALUES} that it has {AFTER_S:g} s after the run's beginning"
        rows.append(compare(what, "values", "higher", counts, bar=BAR, bar_kind="value", note=note))
    write("tracking_busy", rows, chosen.results)


if __name__ == "__main__":
    main()
