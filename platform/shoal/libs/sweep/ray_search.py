"""What decides in a sweep, in the form of Ray Tune: which values a trial has, and which trials go on.

Called by `ray_sweep`. A resumed sweep makes them anew and replays the trials of its record.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.search import Searcher

from shoal.libs.sweep.ray_trial import FAILURE, FINISHED, PROGRESS, STEP, VALUE, format_trial_name, parse_trial_name
from shoal.libs.sweep.spec import CheckedSweep, SweepSpec
from shoal.libs.sweep.trial import PlannedTrial
from shoal.libs.sweep.trials import History, SweepTrial, TrialLog, TrialState


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
