"""The cost of a run, and its cost to a target: pure functions of the run record's rows.

Time-to-accuracy by DAWNBench's rules: the seconds of the training steps until the evaluation that first met the target,
without evaluations, checkpoints and start. Called at the end of a run and by the CLI.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from shoal.train.spec import TargetSpec

if TYPE_CHECKING:
    from pandas import DataFrame

# The seconds of all training steps so far, over all attempts of the run: logged with each evaluation.
TRAINING_S = "time/training_s"
_S_PER_HOUR = 3600.0


class Attempt(NamedTuple):
    """A part of a run with one number of workers; earlier steps took `training_s`."""

    training_s: float
    devices: int


@dataclass(frozen=True)
class TargetReached:
    """The first evaluation that met the target.

    training_s: of the steps up to it
    money:      devices x price x time, with each attempt's own number of devices
    """

    step: int
    value: float
    training_s: float
    money: float


def compute_cost(seconds: float, attempts: Sequence[Attempt], price_per_device_hour: float) -> float:
    """The cost of `seconds` of training, in the price's currency; the attempts are in order."""
    kept: list[Attempt] = []
    for attempt in attempts:  # one resumed from an older checkpoint repeats steps since then
        kept = [*(each for each in kept if each.training_s < attempt.training_s), attempt]
    ends = pairwise([*kept, Attempt(math.inf, 0)])
    device_s = sum(
        attempt.devices * max(0.0, min(seconds, end.training_s) - attempt.training_s) for attempt, end in ends
    )
    return device_s * price_per_device_hour / _S_PER_HOUR


def find_attempts(events: DataFrame, devices: int) -> list[Attempt]:
    """The attempts in the rows of `Run.events()`. Records without attempts have one, of `devices`."""
    began = list(events["details"][events["kind"] == "training"])
    if not began or any("training_s" not in each for each in began):
        return [Attempt(0.0, devices)]
    return [Attempt(float(each["training_s"]), int(each["workers"])) for each in began]


def find_target_reached(
    evaluations: Iterable[tuple[int, float, float]],
    target: TargetSpec,
    attempts: Sequence[Attempt] = (Attempt(0.0, 1),),
    price_per_device_hour: float = 0.0,
) -> TargetReached | None:
    """The first of `evaluations`, each (step, training_s, value) in order of steps, that meets `target`."""
    more = target.is_higher_better
    for step, training_s, value in evaluations:
        if value >= target.value if more else value <= target.value:
            return TargetReached(step, value, training_s, compute_cost(training_s, attempts, price_per_device_hour))
    return None


def get_evaluations(metrics: DataFrame, column: str) -> list[tuple[int, float, float]]:
    """The rows (step, training_s, value) of one evaluated metric of `Run.metrics()`, in order of steps.

    A row without the time takes that of the next row with one: rather too long than too short. Rows after the last
    known time are omitted.
    """
    if column not in metrics or TRAINING_S not in metrics:
        return []
    training_s = metrics[TRAINING_S].bfill()
    rows = zip(metrics.index, training_s, metrics[column], strict=True)
    return [(int(step), float(at), float(value)) for step, at, value in rows if not (math.isnan(at + value))]
