"""Does the demo hold its promise? Runs of `make demo`, each with another seed: trials until one passes, and the return
of the champion's 20 episodes through its endpoint.

    python -m benchmarks.champion_promise [--runs N] [--quick] [--resume] [--sides ours]

Each run is `shoal run actor_learner --actors 4 learner.seed=N` with a SHOAL_HOME of its own. What its record says is
appended to champion_promise.jsonl beside the results; --resume repeats no seed that is there.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.children import OUR_PYTHON, Child, ChildFailed, scratch
from benchmarks.result import Row, compare, options, write

TARGET = 475.0
CAP_S = 600.0  # of a run, start-up and end included
NUM_FIRST_TRIALS = 0.9  # of the runs


def run_demo(seed: int, folder: Path) -> dict[str, Any]:
    """What is kept of one run. Raises ChildFailed when it has no champion."""
    home, started_s = folder / f"home-{seed}", time.monotonic()
    words = [str(Path(OUR_PYTHON).parent / "shoal"), "run", "actor_learner", "--actors", "4", "--plain"]
    words += ["--address", "local", f"learner.seed={seed}"]
    with Child(words, folder, {"SHOAL_HOME": str(home)}, goodbye_s=0.0) as child:
        status = child.wait(CAP_S)
        if status:
            raise ChildFailed(f"seed {seed} ended with status {status}: {child.last_words()}")
    os.environ["SHOAL_HOME"] = str(home)
    import shoal.runs

    events = shoal.runs.list_runs()[0].events().to_dict("records")
    of_kind = {event["kind"]: event["details"] for event in events}
    return {
        "seed": seed,
        "seconds": time.monotonic() - started_s,
        "steps": of_kind["solved"]["steps"],
        "trials": [event["details"] for event in events if event["kind"] == "tried"],
        "mean_return": of_kind["evaluated"]["mean_return"],
    }


def rows_of(runs: list[dict[str, Any]]) -> list[Row]:
    num_held = sum(run["mean_return"] >= TARGET for run in runs)
    num_first = sum(run["trials"][0]["passes"] for run in runs)
    return [
        compare(
            f"demos of {len(runs)} whose first trial passes", "runs", "higher", [num_first],
            bar=NUM_FIRST_TRIALS * len(runs), bar_kind="value",
        ),
        compare(
            f"champions of {len(runs)} demos whose 20 episodes return the target of {TARGET:g}", "runs", "higher",
            [num_held], bar=float(len(runs)), bar_kind="value",
        ),
        compare("mean return of a champion's 20 episodes", "", "higher", [run["mean_return"] for run in runs]),
        compare("trials until a version passes", "trials", "lower", [float(len(run["trials"])) for run in runs]),
        compare("environment steps until the demo is solved", "steps", "lower", [float(run["steps"]) for run in runs]),
        compare("the demo from its start to its end", "s", "lower", [run["seconds"] for run in runs]),
    ]  # fmt: skip


def main() -> None:
    chosen = options(__doc__, runs=20, sides=("ours",))
    kept = chosen.results / "champion_promise.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    runs = [json.loads(line) for line in kept.read_text().splitlines()] if chosen.resume and kept.exists() else []
    with scratch() as folder:
        for seed in range(len(runs) + 1, chosen.runs + 1):
            runs.append(run_demo(seed, folder))
            with kept.open("a") as file:
                file.write(json.dumps(runs[-1]) + "\n")
            print(json.dumps(runs[-1]), flush=True)
    write("champion_promise", rows_of(runs), chosen.results)


if __name__ == "__main__":
    main()
