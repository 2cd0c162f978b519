"""Says what this host knows of runs: for each line of input, `NUMBER RUN_ID`, a line `NUMBER {...}` of JSON.

step:   the newest that was logged, -1 before
latest: the newest values of its metrics
events: all of them, as (kind, details)
saved:  the steps of the checkpoints that the store has; none while it does not answer
"""

import json
import sys
from contextlib import suppress

import shoal.runs
from shoal.checkpoint.stored import StoredCheckpoints, open_run_store
from shoal.errors import RunError, StoreError


def observe(run_id: str) -> dict[str, object]:
    """See above. Before a run has a record, it has nothing."""
    try:
        run = shoal.runs.load(run_id)
    except RunError:
        return {"step": -1, "latest": {}, "events": [], "saved": []}
    events = run.events()
    steps = run.metrics().index
    saved = list[int]()
    with suppress(StoreError):
        saved = sorted(StoredCheckpoints(store).list_steps()) if (store := open_run_store(run.id)) else []
    return {
        "step": int(max(steps, default=-1)),
        "latest": run.latest(),
        "events": list(zip(events["kind"], events["details"], strict=True)),
        "saved": saved,
    }


for line in sys.stdin:
    number, asked = line.split()
    sys.stdout.write(f"{number} {json.dumps(observe(asked), default=str)}\n")
    sys.stdout.flush()
