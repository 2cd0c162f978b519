"""The trials of a sweep on the connected cluster, by Ray Tune.

Ray Tune places the trials and asks its scheduler which of them go on. The run record is what a sweep resumes from:
Ray Tune's own snapshots, which take minutes for many trials, are not written while it runs. Called by `sweep`.

A searcher decides which values a trial has, and a scheduler which trials go on. A resumed sweep makes them anew and
replays the trials of its record.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
from ray import tune
from ray.tune.callback import Callback
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.search import Searcher

import shoal.runs
from shoal.errors import PlanError
from shoal.extend.cluster import RunAdmission, find_growth, format_needs, print_too, set_environment
from shoal.extend.runs import Run, Status
from shoal.extend.train import resolve_device
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
from shoal.libs.sweep.spec import CheckedSweep, SweepSpec
from shoal.libs.sweep.trial import STOP_POLL_S, PlannedTrial, TrialSetting, find_trial, make_run_id
from shoal.libs.sweep.trials import History, SweepTrial, TrialLog, TrialState, load_history, load_sweep


class TuneSearcher(Searcher):
    """An `OptunaSearch` as Ray Tune asks it: first for the trials that go on, then for new ones."""

    def __init__(
        self, spec: SweepSpec, checked: CheckedSweep, planned: Sequence[PlannedTrial], finished: Iterable[SweepTrial]
    ) -> None:
        from shoal.libs.sweep.optuna_search import OptunaSearch

        self._key = f"{VALUE}{checked.metric}"
        super().__init__(metric=self._key, mode="max" if checked.is_higher else "min")
        self._search = OptunaSearch(
            spec.search_space, is_higher=checked.is_higher, seed=spec.seed, is_joint=spec.search == "bohb"
        )
        for trial in finished:
            is_stopped = trial.state is TrialState.STOPPED
            self._search.replay(trial.parameters, trial.step, trial.get_score(checked.metric), is_stopped=is_stopped)
        self._planned = deque(planned)
        self._numbers: dict[str, int] = {}

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        if not self._planned:
            finished: dict[str, Any] = Searcher.FINISHED  # Ray Tune's word for it
            return finished
        planned = self._planned.popleft()
        self._numbers[trial_id] = planned.number
        if planned.parameters:
            self._search.begin(planned.number, planned.parameters)
        else:
            planned = PlannedTrial(planned.number, self._search.ask(planned.number))
        return {"trial": planned.to_config()}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        score = result.get(self._key, math.nan)
        if math.isfinite(score):
            self._search.report(self._numbers[trial_id], result[STEP], score)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        result = result or {}
        score = math.nan if error or result.get(FAILURE) else result.get(self._key, math.nan)
        self._search.end(self._numbers.pop(trial_id), score, is_stopped=not result.get(FINISHED))

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the run record has all that a resumed sweep needs."""


class PopulationScheduler(PopulationBasedTraining):
    """Ray Tune's population-based training, within the user's search space; each copy enters the record.

    concurrent: trials that run at a time
    """

    def __init__(self, spec: SweepSpec, checked: CheckedSweep, log: TrialLog, concurrent: int) -> None:
        every = spec.pbt.every_steps
        interval = every / checked.total_steps if every and checked.total_steps else 1e-9  # each evaluation
        super().__init__(
            metric=f"{VALUE}{checked.metric}",
            mode="max" if checked.is_higher else "min",
            time_attr=PROGRESS,
            perturbation_interval=interval,
            quantile_fraction=spec.pbt.quantile,
            custom_explore_fn=lambda config: config,  # `_get_new_config` explores; this one is demanded
            log_config=False,
            require_attrs=False,
        )
        self._space, self._resample = spec.search_space, spec.pbt.resample
        self._concurrent = concurrent
        self._log, self._rng = log, np.random.default_rng([spec.seed, 1 << 20])

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """A trial that has diverged copies the best one at once; it ends if no other has been evaluated."""
        if not result[FAILURE]:
            decision: str = super().on_trial_result(tune_controller, trial, result)
            # Ray Tune pauses a trial whenever another waits, also where there is room for both.
            is_needless = decision == TrialScheduler.PAUSE and len(self._trial_state) <= self._concurrent
            return TrialScheduler.CONTINUE if is_needless else decision
        states = self._trial_state
        others = [each for each in states if each is not trial and not each.is_finished()]
        scored = [each for each in others if states[each].last_score is not None]
        if not scored:
            return TrialScheduler.STOP
        best = max(scored, key=lambda each: states[each].last_score)
        if not states[best].last_checkpoint:
            self._checkpoint_or_exploit(best, tune_controller, [best], [])  # saves it
        self._checkpoint_or_exploit(trial, tune_controller, [best], [trial])
        return TrialScheduler.NOOP if trial.status == Trial.PAUSED else TrialScheduler.STOP

    def _get_new_config(self, trial: Trial, trial_to_clone: Trial) -> tuple[dict[str, Any], dict[str, Any]]:
        number, source = (parse_trial_name(each.custom_trial_name) for each in (trial, trial_to_clone))
        config = copy.deepcopy(trial_to_clone.config)
        # Each value is perturbed, or with probability `resample` drawn anew (arXiv:1711.09846, section 4.1).
        perturbed = self._space.perturb(config["trial"]["parameters"], self._rng)
        parameters = self._space.resample(perturbed, self._rng, self._resample)
        config["trial"] = {"number": number, "parameters": parameters, "source": source}
        self._log.copy(number, source, trial_to_clone.last_result[STEP], parameters)
        return config, {}


def make_scheduler(
    spec: SweepSpec, checked: CheckedSweep, log: TrialLog, concurrent: int, finished: Iterable[tuple[int, History]]
) -> TrialScheduler:
    """The scheduler of the sweep; at the rungs of successive halving are the trials that have ended before."""
    if spec.search == "pbt":
        return PopulationScheduler(spec, checked, log, concurrent)
    if not spec.uses_asha:
        return FIFOScheduler()
    scheduler = ASHAScheduler(
        metric=f"{VALUE}{checked.metric}",
        mode="max" if checked.is_higher else "min",
        time_attr=PROGRESS,
        max_t=0.999,  # at its end a trial ends by itself
        stop_last_trials=False,
        grace_period=spec.asha.first_rung,
        reduction_factor=spec.asha.factor,
    )
    for number, history in finished:
        stub = SimpleNamespace(trial_id=format_trial_name(number))
        scheduler.on_trial_add(None, stub)
        for progress, score in history:
            scheduler.on_trial_result(None, stub, {PROGRESS: progress, f"{VALUE}{checked.metric}": score})
    return scheduler


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
