"""The trials of a sweep on the connected cluster, by Ray Tune.

Ray Tune places the trials and asks its scheduler which of them go on. The run record is what a sweep resumes from:
Ray Tune's own snapshots, which take minutes for many trials, are not written while it runs. Called by `sweep`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray import tune
from ray.tune.callback import Callback
from ray.tune.experiment import Trial

import shoal.runs
from shoal.errors import PlanError
from shoal.extend.cluster import RunAdmission, find_growth, format_needs, print_too, set_environment
from shoal.extend.runs import Run, Status
from shoal.extend.train import resolve_device
from shoal.libs.sweep.ray_search import TuneSearcher, make_scheduler
from shoal.libs.sweep.ray_trial import (
    FAILURE,
    FINISHED,
    PROGRESS,
    STEP,
    VALUE,
    TuneTrial,
    format_trial_name,
    parse_trial_name,
)
from shoal.libs.sweep.spec import SweepSpec
from shoal.libs.sweep.trial import STOP_POLL_S, PlannedTrial, TrialSetting, find_trial, make_run_id
from shoal.libs.sweep.trials import TrialLog, TrialState, load_history, load_sweep

NUM_RETRIES = 2  # of a trial whose process has died; it goes on from its checkpoint
STOP_TIMEOUT_S = 10.0  # for the trials to save, before Ray kills the job
DRIVER_BYTES = 100 << 20
_SETTINGS = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # a trial finds its files where the driver does
    "TUNE_GLOBAL_CHECKPOINT_S": "1e9",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C is the job's
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a trial may end before its first evaluation
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_WARN_THRESHOLD_S": "5",
    "RAY_AIR_NEW_OUTPUT": "0",  # the table is the command line's
}


class _Recorder(Callback):
    """Writes what happens to the trials into the sweep's record."""

    def __init__(self, log: TrialLog, setting: TrialSetting, mark_running: Callable[[], None]) -> None:
        self._log = log
        self._sweep_id = setting.sweep_id
        self._mark_running = mark_running
        self._started: set[int] = set()

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._mark_running()
        number = parse_trial_name(trial.custom_trial_name)
        self._started.add(number)
        self._log.start(number, make_run_id(self._sweep_id, number), trial.config["trial"]["parameters"])

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        if not result[FAILURE]:
            number = parse_trial_name(trial.custom_trial_name)
            self._log.report(number, result[STEP], result[PROGRESS], _select_values(result))

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        result, number = trial.last_result, parse_trial_name(trial.custom_trial_name)
        failure = result.get(FAILURE, "")
        state = TrialState.FAILED if failure else TrialState.FINISHED if result[FINISHED] else TrialState.STOPPED
        self._log.end(number, state, result[STEP], {} if failure else _select_values(result), failure)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        number, result = parse_trial_name(trial.custom_trial_name), trial.last_result or {}
        if number not in self._started:  # it has failed in its setup, before Ray calls on_trial_start
            self.on_trial_start(iteration, trials, trial)
        problem = str(trial.get_error() or "its process has died").strip()
        self._log.end(number, TrialState.FAILED, result.get(STEP, 0), {}, problem)


def _select_values(result: Mapping[str, Any]) -> dict[str, float]:
    return {name.removeprefix(VALUE): value for name, value in result.items() if name.startswith(VALUE)}


def run_trials(setting: TrialSetting, planned: Sequence[PlannedTrial], log: TrialLog, before: Run | None) -> None:
    """Run the planned trials to their ends. Raises PlanError when none fits on the cluster, NoCapacity when the first
    one has waited in vain.

    before: the record of an interrupted sweep that goes on
    """
    with RunAdmission(setting.sweep_id, setting.spec.queued.priority) as admission, set_environment(_SETTINGS):
        spec, checked = setting.spec, setting.checked
        again = {each.number for each in planned}
        ended = [each for each in load_sweep(before).trials if each.number not in again] if before is not None else []
        histories = [
            (each.number, load_history(before, each.number, checked.metric)) for each in ended if before is not None
        ]
        is_asked = spec.search in ("optuna", "bohb")
        logging.getLogger("ray.tune").setLevel(logging.ERROR)
        concurrent = count_concurrent_trials(spec, print_too(log.record_event), admission)
        if spec.search == "pbt" and spec.starts_workers and concurrent < spec.trials:
            problem = f"the cluster has room for {concurrent} of these trials, and those with workers take no turns"
            raise PlanError("trials", spec.trials, problem, "use fewer trials or workers, or a larger cluster")
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(TuneTrial, setting=setting), _get_resources(spec)),
            param_space={} if is_asked else {"trial": tune.grid_search([each.to_config() for each in planned])},
            tune_config=tune.TuneConfig(
                search_alg=TuneSearcher(spec, checked, planned, ended) if is_asked else None,
                scheduler=make_scheduler(spec, checked, log, concurrent, histories),
                num_samples=len(planned) if is_asked else 1,
                max_concurrent_trials=None if spec.search == "pbt" else concurrent,  # a population takes turns
                reuse_actors=True,
                trial_name_creator=_name_trial,
                trial_dirname_creator=_name_trial,
            ),
            run_config=tune.RunConfig(
                name="tune",
                storage_path=str(setting.home / "runs" / setting.sweep_id),
                callbacks=[_Recorder(log, setting, lambda: admission.mark_running(concurrent))],
                failure_config=tune.FailureConfig(max_failures=NUM_RETRIES),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # a trial's own run has them
                verbose=0,
            ),
        )
        setting.stop_file.unlink(missing_ok=True)
        try:
            tuner.fit()
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM
            # Let the running trials save a checkpoint and end, within the time that a stopped job
            # has.
            print("stopping: saving checkpoints ...", flush=True)
            setting.stop_file.touch()
            deadline = time.monotonic() + STOP_TIMEOUT_S
            trials = load_sweep(shoal.runs.load(setting.sweep_id)).trials
            running = [each.run_id for each in trials if each.state is TrialState.RUNNING]
            while running and time.monotonic() < deadline:
                time.sleep(STOP_POLL_S)
                records = [find_trial(run_id) for run_id in running]
                running = [record.id for record in records if record is not None and record.status is Status.RUNNING]
            raise


def _name_trial(trial: Trial) -> str:
    return format_trial_name(trial.config["trial"]["number"])


def _get_resources(spec: SweepSpec) -> dict[str, float]:
    """Of a trial's own process; the workers of a trial of several ask for theirs."""
    if spec.starts_workers:
        return {"memory": DRIVER_BYTES}  # no CPU, but Ray Tune demands something
    return {"CPU": spec.cpus_per_trial, "GPU": spec.gpus_per_trial}


def count_concurrent_trials(spec: SweepSpec, record: Callable[..., None], admission: RunAdmission) -> int:
    """How many trials the cluster has room for, with what its autoscaler may add; at most `spec.concurrent`.

    Waits until the first one has its places. Raises PlanError where none ever fits, NoCapacity when none has fitted
    within `train.wait`, or `loop.wait`.

    record: records an event
    """
    train, cluster = spec.train, ray.cluster_resources()
    if spec.starts_workers:
        resource = "GPU" if resolve_device(train).device == "cuda" else "CPU"
        needs, bundles = {resource: float(train.workers)}, [{resource: 1.0}] * train.workers
    else:
        needs = {"CPU": spec.cpus_per_trial, "GPU": spec.gpus_per_trial}
        bundles = [needs]
    fits = _count_fits(needs, cluster)
    least = min(fits.values())
    growth = find_growth() if least < (spec.concurrent or spec.trials) else None
    if growth and growth.can_hold(bundles):
        least = min(_count_fits(needs, {name: sum(growth.list_hosts(name)) for name in needs}).values())
    if not least:
        scarce = min(fits, key=lambda name: fits[name])
        field = "workers" if spec.starts_workers else f"{scarce.lower()}s_per_trial"
        problem = f"the cluster has {cluster.get(scarce, 0.0):g} {scarce}s, fewer than one trial needs"
        added = f", and its autoscaler may add no more than {growth}" if growth else ""
        raise PlanError(field, needs[scarce], problem + added, "use less, or a larger cluster")
    admission.wait(bundles, f"a trial needs {format_needs(needs)}", spec.queued.wait, record)
    return min(least, spec.concurrent or least)


def _count_fits(needs: Mapping[str, float], there: Mapping[str, float]) -> dict[str, int]:
    return {name: int(there.get(name, 0.0) / need + 1e-9) for name, need in needs.items() if need}
