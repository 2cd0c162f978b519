"""Which values the next trial has, by Optuna's tree-structured Parzen estimator (NeurIPS 2011, "Algorithms for
Hyper-Parameter Optimization").

Called by `ray_sweep`. It asks and tells an Optuna study in memory; a resumed sweep tells it the trials of its record
again. Ray Tune's own `OptunaSearch` is not used: it has to be restored from Ray Tune's snapshots, and it tells Optuna
nothing of the evaluations at which a trial was ended. Imports Optuna, which is of the extra `sweep`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import TPESampler
from optuna.trial import TrialState

from shoal.search.space import Distribution, Interval, Options, SearchSpace


class OptunaSearch:
    """Asks for the values of trials, and tells how they went.

    is_higher: whether a higher score is better
    is_joint:  model the hyper-parameters jointly instead of one by one. With trials that end early this is the idea of
               BOHB (arXiv:1807.01774): the model is of the trials that went furthest
    """

    def __init__(self, space: SearchSpace, *, is_higher: bool, seed: int, is_joint: bool) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            # A trial that goes on counts as a bad one, so that trials at the same time differ.
            sampler = TPESampler(seed=seed, multivariate=is_joint, constant_liar=True)
        self._space = space
        self._study = optuna.create_study(direction="maximize" if is_higher else "minimize", sampler=sampler)
        self._distributions = {path: _to_optuna(each) for path, each in space.items()}
        self._trials: dict[int, optuna.trial.Trial] = {}

    def ask(self, number: int) -> dict[str, object]:
        """The values of trial `number`."""
        self._trials[number] = trial = self._study.ask(self._distributions)
        parameters = {}
        for path, value in trial.params.items():
            each = self._space[path]
            parameters[path] = each.options[int(str(value))] if isinstance(each, Options) else value
        return parameters

    def begin(self, number: int, parameters: Mapping[str, object]) -> None:
        """A trial goes on whose values were chosen by an earlier attempt."""
        self._study.enqueue_trial(self._to_optuna(parameters))
        self.ask(number)

    def report(self, number: int, step: int, score: float) -> None:
        """An evaluation of a trial."""
        self._trials[number].report(score, step)

    def end(self, number: int, score: float, *, is_stopped: bool) -> None:
        """A trial has ended: by itself, or stopped by the scheduler. Without a finite score it has failed."""
        trial = self._trials.pop(number)
        if not math.isfinite(score):
            self._study.tell(trial, state=TrialState.FAIL)
        elif is_stopped:
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, score)

    def replay(self, parameters: Mapping[str, object], step: int, score: float, *, is_stopped: bool) -> None:
        """A trial that has ended in an earlier attempt, by itself or stopped, at `step`."""
        if not math.isfinite(score):
            return
        self._study.add_trial(
            optuna.trial.create_trial(
                state=TrialState.PRUNED if is_stopped else TrialState.COMPLETE,
                value=score,
                params=self._to_optuna(parameters),
                distributions=self._distributions,
                intermediate_values={step: score},
            )
        )

    def _to_optuna(self, parameters: Mapping[str, object]) -> dict[str, object]:
        """Options by their index: Optuna takes no lists."""
        encoded = {}
        for path, value in parameters.items():
            each = self._space[path]
            encoded[path] = each.options.index(value) if isinstance(each, Options) else value
        return encoded


def _to_optuna(distribution: Distribution) -> BaseDistribution:
    if not isinstance(distribution, Interval):
        return CategoricalDistribution(range(len(distribution.options)))
    low = distribution.low
    high = distribution.high
    is_log = distribution.is_log
    if distribution.is_integer:
        return IntDistribution(int(low), int(high), log=is_log)
    return FloatDistribution(low, high, log=is_log)
