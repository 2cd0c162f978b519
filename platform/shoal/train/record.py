"""The record of a training run, new or resumed, for as long as this process writes it. Called by the shells."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import shoal.runs
from shoal.runs import RunRecorder
from shoal.train.spec import TrainSpec


@contextmanager
def record_of(spec: TrainSpec, job: str, resumed: str = "", run_id: str | None = None) -> Iterator[RunRecorder]:
    """The record of the run `resumed`, or of a new one. How the body ends is how the run ends.

    What `spec` changes of a resumed run is on trial until that trains: refused by then, its record says what it said
    before, so that it can be resumed with other words. Raises RunError as `shoal.runs.reopen` does.
    """
    if not resumed:
        with shoal.runs.create(job, spec.to_yaml(), run_id) as recorder:
            yield recorder
        return
    before = shoal.runs.load(resumed).spec
    with shoal.runs.reopen(resumed, spec.to_yaml()) as recorder:
        try:
            yield recorder
        except Exception:  # a Task of the user's own may raise anything
            if "training" not in shoal.runs.load(recorder.id).last_events(since_resumed=True):
                recorder.change_spec(before)
            raise
