"""When a run ends, and which step's network is retained: a state machine without clock, model or record.

The Trainer reports every step and every evaluation to `StopPolicy`, which returns a decision (on rank 0, which sends it
to all: clocks differ). The first criterion that is met counts. At the same step, a target or a convergence counts
before a limit: a run that reaches its target in the evaluation after its last step has reached its target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any, Literal

from shoal.errors import ConfigError
from shoal.runs.formatting import format_duration, format_number
from shoal.train.spec import ConvergenceSpec, StopSpec

Reason = Literal["steps", "epochs", "wall_s", "money", "target", "convergence", "callback", "interrupted"]


class Due(Flag):
    """What follows a step. Each needs the ranks' signals first."""

    EXCHANGE = auto()
    REPORT = auto()
    EVALUATION = auto()
    CHECKPOINT = auto()
    EPOCH = auto()  # its end, where there are callbacks


@dataclass(frozen=True)
class StopDecision:
    """The decision to end.

    detail:    the reason in words, with the numbers
    step:      the number of steps so far
    keep_step: the step of the network to retain: the best so far, where convergence is watched or a target was missed
    """

    reason: Reason
    detail: str
    step: int
    keep_step: int


@dataclass
class _Spent:
    elapsed_s: float = 0.0
    money: float = 0.0


class StopPolicy:
    """Decides when a run ends. A decision is final, except that an evaluation of the same step may improve it.

    devices:               to be paid for, in this attempt of the run
    price_per_device_hour: of each
    """

    def __init__(self, spec: StopSpec, devices: int = 1, price_per_device_hour: float = 0.0) -> None:
        self._spec = spec
        self._money_per_s = devices * price_per_device_hour / 3600
        self._before, self._now = _Spent(), _Spent()
        self._best: tuple[int, float] | None = None
        self._num_since_best = 0
        self._evaluated_step = -1
        self._stop: StopDecision | None = None

    @property
    def best_step(self) -> int | None:
        """The best network's step so far; None unless convergence or a target is watched."""
        return None if self._best is None else self._best[0]

    @property
    def elapsed_s(self) -> float:
        """Over all attempts of the run, as last reported."""
        return self._before.elapsed_s + self._now.elapsed_s

    @property
    def money(self) -> float:
        """Spent in all attempts of the run, as last reported."""
        return self._before.money + self._now.money

    def decide_after_step(self, step: int, epoch: float, elapsed_s: float) -> StopDecision | None:
        """Called after `step` steps and `epoch` epochs, `elapsed_s` after the start of this attempt."""
        self._now = _Spent(elapsed_s, elapsed_s * self._money_per_s)
        if self._stop is None:
            self._stop = self._check_limits(step, epoch)
        return self._stop

    def decide_on_request(self, step: int, why: str) -> StopDecision:
        """Called when a callback has asked to end."""
        if self._stop is None:
            self._stop = self._make_decision("callback", f"{why}, at step {step:,}", step)
        return self._stop

    def decide_after_evaluation(self, step: int, metrics: Mapping[str, float]) -> StopDecision | None:
        """Called with the metrics of the network after `step` steps.

        Raises ConfigError when a metric of the spec is missing.
        """
        if self._stop is not None and self._stop.step != step:
            return self._stop
        converged = self._check_convergence(step, metrics)  # even if the target is met: it determines the best step
        reached = self._check_target(step, metrics)
        if reached is None and self._stop is not None and self._stop.reason == "target":
            return self._stop
        self._stop = (
            reached or converged or (self._stop and self._make_decision(self._stop.reason, self._stop.detail, step))
        )
        return self._stop

    def state_dict(self) -> dict[str, Any]:
        """The state for a later attempt, ready for JSON."""
        best = None if self._best is None else list(self._best)
        return {
            "elapsed_s": self.elapsed_s,
            "money": self.money,
            "best": best,
            "since_best": self._num_since_best,
            "judged_step": self._evaluated_step,
            "watched": self._watched_measure,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the `state_dict` of an earlier attempt; this attempt starts at 0 s.

        A best value by another metric than the spec's is dropped.
        """
        self._before, self._now = _Spent(state["elapsed_s"], state["money"]), _Spent()
        self._best = None
        self._num_since_best = 0
        self._evaluated_step = -1
        self._stop = None
        if self._watched_measure is None or self._watched_measure != state["watched"]:
            return
        if state["best"] is not None:
            self._best = int(state["best"][0]), float(state["best"][1])
        self._num_since_best, self._evaluated_step = int(state["since_best"]), int(state["judged_step"])

    @property
    def _watched_measure(self) -> list[str] | None:
        """The comparison of networks: the metric, and its direction."""
        spec = self._spec.convergence or self._spec.target
        if spec is None:
            return None
        return [spec.metric, "max" if spec.is_higher_better else "min"]

    def _check_limits(self, step: int, epoch: float) -> StopDecision | None:
        spec = self._spec
        if spec.steps is not None and step >= spec.steps:
            return self._make_decision("steps", f"{spec.steps:,} steps", step)
        if spec.epochs is not None and epoch >= spec.epochs:
            return self._make_decision("epochs", f"{spec.epochs:g} epoch{'' if spec.epochs == 1 else 's'}", step)
        if spec.wall_s is not None and self.elapsed_s >= spec.wall_s:
            return self._make_decision(
                "wall_s", f"{format_duration(self.elapsed_s)} of {format_duration(spec.wall_s)}", step
            )
        if spec.money is not None and self.money >= spec.money:
            return self._make_decision(
                "money", f"{format_number(self.money)} spent of {format_number(spec.money)}", step
            )
        return None

    def _check_target(self, step: int, metrics: Mapping[str, float]) -> StopDecision | None:
        target = self._spec.target
        if target is None:
            return None
        value = _get_metric(metrics, target.metric, "stop.target.metric")
        more = target.is_higher_better
        if not (value >= target.value if more else value <= target.value):  # also for NaN
            return None
        sign = ">=" if more else "<="
        detail = f"{target.metric} {format_number(value)} {sign} {format_number(target.value)} at step {step:,}"
        return StopDecision("target", detail, step, step)

    def _check_convergence(self, step: int, metrics: Mapping[str, float]) -> StopDecision | None:
        spec = self._spec.convergence or self._spec.target  # of a target that is missed, the best network is retained
        if spec is None:
            return None
        field = "target" if self._spec.convergence is None else "convergence"
        value = _get_metric(metrics, spec.metric, f"stop.{field}.metric")
        if step != self._evaluated_step:  # the same network again, as after a resume, counts once
            self._evaluated_step = step
            sign = 1.0 if spec.is_higher_better else -1.0
            least = spec.min_improvement if isinstance(spec, ConvergenceSpec) else 0.0
            is_better = self._best is None or sign * (value - self._best[1]) > least
            if not math.isnan(value) and is_better:
                self._best, self._num_since_best = (step, value), 0
            else:
                self._num_since_best += 1
        if not isinstance(spec, ConvergenceSpec) or self._num_since_best < spec.patience + (
            self._best is None
        ):  # without any number, the first one counts too
            return None
        evaluations = f"{self._num_since_best} evaluation{'s' if self._num_since_best > 1 else ''}"
        if self._best is None:
            return self._make_decision("convergence", f"{spec.metric} was not a number in {evaluations}", step)
        best_step, best = self._best
        detail = (
            f"{spec.metric} {format_number(best)} of step {best_step:,} was not bettered by {evaluations} that followed"
        )
        return self._make_decision("convergence", detail, step)

    def _make_decision(self, reason: Reason, detail: str, step: int) -> StopDecision:
        return StopDecision(reason, detail, step, step if self._best is None else self._best[0])


def _get_metric(metrics: Mapping[str, float], metric: str, field: str) -> float:
    if metric not in metrics:
        raise ConfigError(field, metric, "is not evaluated", f"the evaluation gives {', '.join(metrics) or 'nothing'}")
    return metrics[metric]
