"""`shoal runs track`: send a recorded run to a tracker."""

from __future__ import annotations

import click

from shoal.errors import RunError
from shoal.extend.runs import load, load_tracker
from shoal.libs.tracking.follower import Follower

GRACE_S = 300.0  # for a tracker's server that does not answer: a person waits, and may end it


@click.command()
@click.argument("run", default="latest")
@click.option("--to", "tracker", required=True, help="mlflow, wandb, trackio, or your own: my_tracker.py:MyTracker.")
def track(run: str, tracker: str) -> None:
    """Send a RUN (the newest when left out) to a tracker: all of it, or what the tracker lacks.

    For a run that had no `track`, or a tracker that did not answer. The tracker's own environment variables name its
    server. This follows a running run until it ends.

    \b
    Examples:
      MLFLOW_TRACKING_URI=http://127.0.0.1:5000 shoal runs track latest --to mlflow
      shoal runs track 20261120-0645 --to wandb
    """
    follow = load_tracker(tracker)
    record = load(run)
    state = Follower(record, tracker, follow, grace_s=GRACE_S).follow()
    if not state.is_complete:
        raise RunError(f"{tracker} lacks values of run {record.id}: {state.problem or 'the run was resumed'}")
    click.echo(f"{record.id} is in {tracker} ({state.sent:,} values): {state.url}")
