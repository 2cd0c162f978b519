"""A recorder for a new or resumed run, as a context. Called by flows and by `train.launch.local`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shoal.errors import RunError
from shoal.runs.record.opening import create, reopen
from shoal.runs.record.recorder import RunRecorder
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
    """Record the run `resumed`, or a new one. The end of the body is the end of the run.

    Until the event `begun`, a resumed run's new `spec` (YAML) is provisional: if the run fails before, its record keeps
    the old spec, so that it can be resumed with other overrides. Raises RunError as `reopen` does.
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
            with suppress(RunError):  # an unwritable record: the original error is reported
                if begun not in load(recorder.id).last_events(since_resumed=True):
                    recorder.change_spec(before)
            raise
