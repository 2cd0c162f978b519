"""A kind of run of a user's or a library's own: fields, a check, a record, a report.

    class Fit(Spec):
        degree: int = 2

    def fit(spec: Fit, recorder: RunRecorder) -> None:
        recorder.log(0, {"error": 0.1})

    if __name__ == "__main__":
        RunFlow("fit", Fit(), fit).main()

`shoal run fit.py degree=3` runs it as a job, with its record; so does `python fit.py degree=3` in its own process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import shoal.runs
from shoal.cluster.job_main import expected_run_id, job_main
from shoal.config import Spec
from shoal.runs import RunKind, RunRecorder

SpecT = TypeVar("SpecT", bound=Spec)
STARTED = "started"


@contextmanager
def recorded_run(spec: Spec, job: str, kind: str, event: str = "") -> Iterator[RunRecorder]:
    """The record of a run while it lasts, and its report at the end, unless the run fails.

    event: from this one on, a resumed run has its new spec; "": the one of the kind's name
    """
    with shoal.runs.recording(
        spec.to_record(),
        job,
        begun=event or kind,
        kind=RunKind(kind),
        resumed=getattr(spec, "resume", ""),
        run_id=expected_run_id(),
    ) as recorder:
        yield recorder
    shoal.runs.write_report_at_end(recorder.id)


@dataclass(frozen=True)
class RunFlow(Generic[SpecT]):
    """What a run of this kind does.

    kind:          in its record; a library's display and report panels of this name show it
    spec:          the fields with their defaults; a run with a field `resume` may continue an earlier one
    run:           does the work, and gives metrics and events to the recorder; what it raises fails the run
    check:         refuses fields before a cluster is started. Raises ShoalError
    needs_cluster: without one, and where $RAY_ADDRESS names none, the run has this process
    """

    kind: str
    spec: SpecT
    run: Callable[[SpecT, RunRecorder], object]
    check: Callable[[SpecT], object] = lambda spec: None
    needs_cluster: bool = False

    def main(self) -> None:
        """The main function of a job's file: reads fields from the command line. Exits 1 on a ShoalError or OSError."""
        job_main(self.spec, self.start, self.kind, self.check, needs_cluster=self.needs_cluster)

    def start(self, spec: SpecT, job: str = "") -> str:
        """Run it to its end, and write its report; returns its id. Raises ShoalError."""
        with recorded_run(spec, job or self.kind, self.kind, STARTED) as recorder:
            recorder.record_event(STARTED)
            self.run(spec, recorder)
        return recorder.id
