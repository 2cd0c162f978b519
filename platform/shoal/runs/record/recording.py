"""The record of a run, new or resumed, for as long as this process writes it. Called by flows and by `train.alone`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shoal.errors import RunError
from shoal.runs.record.recorder import RunRecorder, create, reopen
from shoal.runs.run_kind import RunKind
from shoal.runs.run_reader import load


@contextmanager
def recording(
    spec: str,
    job: str,
    *,
    begun: str,
    kind: RunKind | None = None,
    resumed: str = "",
    run_id: str | None = None,
) -> Iterator[RunRecorder]:
    """The record of the run `resumed`, or of a new one. How the body ends is how the run ends.

    What `spec` (YAML) changes of a resumed run is on trial until the event `begun`: refused by then, its record says
    what it said before, so that it can be resumed with other words. Raises RunError as `reopen` does.
    """
    if not resumed:
        with create(job, spec, run_id, kind=kind) as recorder:
            yield recorder
        return
    before = load(resumed).spec
    with reopen(resumed, spec) as recorder:
        try:
            yield recorder
        except Exception:  # a user's own code may raise anything
            with suppress(RunError):  # of a record that cannot be written: what is told is the first error
                if begun not in load(recorder.id).last_events(since_resumed=True):
                    recorder.change_spec(before)
            raise
