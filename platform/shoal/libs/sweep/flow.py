"""A sweep on a cluster: its record, its trials, and at the end the best of them registered.

Called by `jobs/sweep.py`, in a process connected to a Ray cluster. `ray_sweep` runs the trials. A resumed sweep reads
its record: finished trials are not repeated, others go on from their checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

import shoal.runs
from shoal.errors import RunError, needs_extra
from shoal.extend.cluster import job_main, print_too
from shoal.extend.flows import recorded_run
from shoal.extend.registry import Criterion
from shoal.extend.runs import RunRecorder, format_number
from shoal.extend.train import fetch_weights, register_model, validate_run
from shoal.home import home
from shoal.libs.sweep.spec import CheckedSweep, SweepSpec, check_sweep, sweep_from_overrides
from shoal.libs.sweep.trial import PlannedTrial, TrialSetting, load_result
from shoal.libs.sweep.trials import SWEEPING, SweepTrial, TrialLog, load_sweep

JOB = "sweep"


def sweep_main() -> None:
    """The main function of jobs/sweep.py."""
    checked: list[CheckedSweep] = []

    def run(spec: SweepSpec, job: str) -> str:
        return run_sweep(spec, job, checked.pop())

    job_main(sweep_from_overrides, run, job=JOB, check=lambda spec: checked.append(check_sweep(spec)))


def run_sweep(spec: SweepSpec, job: str = JOB, checked: CheckedSweep | None = None) -> str:
    """Run all trials to their ends, register the best network, and return the run's id.

    Raises RunError when no trial could be trained, PlanError when none fits on the cluster, RegistryError.
    """
    checked = checked or check_sweep(spec)
    with recorded_run(spec, job, "sweep", "sweeping") as recorder:
        record = shoal.runs.load(recorder.id)
        before = record if spec.resume and SWEEPING in record.last_events() else None
        log = TrialLog(recorder)
        log.begin(
            num_trials=spec.trials,
            metric=checked.metric,
            is_higher=checked.is_higher,
            search=spec.search,
            scheduler="asha" if spec.uses_asha else "none",
        )
        over = " ".join(f"{path}={word}" for path, word in spec.search_space.describe().items())
        print(f"run {recorder.id}: {spec.trials} trials of {spec.source} over {over}", flush=True)
        planned = plan_trials(spec, load_sweep(before).trials if before is not None else ())
        if planned:
            with needs_extra("train"):  # Ray Tune takes a second to load, which no check waits for
                from shoal.libs.sweep.ray_sweep import run_trials

            run_trials(TrialSetting(recorder.id, spec, checked, home(), Path.cwd()), planned, log, before)
        recorder.flush()
        sweep = load_sweep(shoal.runs.load(recorder.id))
        if (best := sweep.find_best()) is None:
            failures = [each.failure for each in sweep.trials if each.failure]
            first = failures[0] if failures else "none was recorded"
            raise RunError(f"no trial has finished; the first failure: {first}")
        metric, score = checked.metric, best.get_score(checked.metric)
        recorder.record_event("best_trial", trial=best.number, run_id=best.run_id, metric=metric, value=score)
        found = f"trial {best.number}, {metric} {format_number(score)}"
        print(f"run {recorder.id}: the best of {len(sweep.trials)} is {found}")
        if spec.registers:
            _register(spec, checked, recorder, best)
    return recorder.id


def plan_trials(spec: SweepSpec, before: Iterable[SweepTrial]) -> list[PlannedTrial]:
    """The trials to run: those that an earlier attempt has left, then new ones.

    The values of new ones are the same for the same seed, and missing where the search chooses them later; those of
    the first one are `spec.first`.
    """
    known = {each.number: each for each in before}
    space, is_chosen_later = spec.search_space, spec.search in ("optuna", "bohb")
    left = [each for each in known.values() if not each.is_over or (spec.retry_failed and each.failure)]
    planned = [PlannedTrial(each.number, each.parameters) for each in left]
    for number in range(spec.trials):
        if number not in known:
            values = {} if is_chosen_later else space.sample(np.random.default_rng([spec.seed, number]))
            planned.append(PlannedTrial(number, spec.first or values if number == 0 else values))
    return planned


def _register(spec: SweepSpec, checked: CheckedSweep, recorder: RunRecorder, best: SweepTrial) -> None:
    lineage = {"sweep": recorder.id, "trial": best.number, "run": best.run_id, "parameters": best.parameters}
    if checked.run is None:
        from shoal.libs.sweep.loop_trial import register_trial  # what the loop needs, trainings do not wait for

        register_trial(spec.make_loop_spec(best.parameters), best.run_id, recorder, lineage)
        return
    train, run = spec.make_trial_spec(best.parameters), checked.run
    if train.args != spec.train.args:
        run = validate_run(train)
    result = load_result(best.run_id)
    fetch_weights(result, best.run_id)
    criterion = Criterion(checked.metric, checked.is_higher)
    version = register_model(train, result, run.factory, run.signature, run.fingerprint, recorder, lineage, criterion)
    if version.problem:
        print_too(recorder.record_event)("unservable", model=version.ref, error=version.problem)
