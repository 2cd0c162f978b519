"""The last things of a run: the network goes into the registry, and the record gets what the run has cost.

Called by the shells, in the process that writes the record, after the Trainer has returned.
"""

from __future__ import annotations

import shoal.runs
from shoal.runs import RunRecorder
from shoal.runs.run_status import Status
from shoal.train.export.model_entry import register
from shoal.train.launch.validate import Checked
from shoal.train.reporting.result import Outcome
from shoal.train.reporting.time_to_accuracy import evaluations_of, first_reached, lives_of
from shoal.train.spec import TrainSpec


def end_run(spec: TrainSpec, outcome: Outcome, checked: Checked, recorder: RunRecorder, *, registers: bool) -> None:
    """Record how the run ended; register its network, unless it was interrupted. Raises RegistryError."""
    recorder.event("data", **checked.fingerprint)
    if outcome.is_interrupted:
        recorder.finish(Status.STOPPED, "interrupted")
        return
    recorder.event(
        "trained",
        reason=outcome.reason,
        detail=outcome.detail,
        steps=outcome.steps,
        kept=outcome.kept,
        seconds=outcome.seconds,
        metrics=outcome.metrics,
    )
    recorder.flush()
    target = spec.stop.target
    if target is not None:
        run = shoal.runs.load(recorder.id)
        rows = evaluations_of(run.metrics(), f"validation/{target.metric}")
        found = first_reached(rows, target, lives_of(run.events(), spec.workers), spec.price_per_device_hour)
        if found is not None:
            recorder.event("target_reached", step=found.step, training_s=found.training_s, money=found.money)
    if registers:
        register(spec, outcome, checked.factory, checked.signature, checked.fingerprint, recorder)
