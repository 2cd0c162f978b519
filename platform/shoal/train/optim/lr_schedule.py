"""The learning rate by step: pure functions of the step, the schedule's spec and the number of steps of the run.

Called by the Trainer before each step of the optimiser, and for plots. Holds no state, so that a resumed run has the
rates of an uninterrupted one. Knows no optimiser: see `optimizers.set_learning_rate`.

Steps are counted when finished: the first step of a run has the rate of step 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.train.run_facts import epochs_to_steps
from shoal.train.spec import ScheduleSpec, TrainSpec

ONE_CYCLE_START = 1 / 25
ONE_CYCLE_END = 1e-4
ONE_CYCLE_WARMUP = 0.3  # of the run, if the spec gives none: a cycle needs a rise
MOMENTUM_LOW, MOMENTUM_HIGH = 0.85, 0.95


@dataclass(frozen=True)
class SchedulePosition:
    """A run's position towards its nearest known end: after `step` of `total_steps` steps.

    For an end in epochs, both are in steps of the present batch size: earlier steps may have had another.
    """

    step: float
    total_steps: int | None


def compute_learning_rate(
    step: float, spec: ScheduleSpec, total_steps: int | None, num_taken: float | None = None
) -> float:
    """The share of `optimizer.learning_rate` for step `step` (from 0); after the end, the last one.

    total_steps: from `resolve_total_steps`; may be None for a schedule that does not depend on it
    num_taken:   the real number of steps, if it is not `step`: a warm-up in steps counts these
    """
    taken = step if num_taken is None else num_taken
    if spec.name == "one_cycle":
        end = spec.final or ONE_CYCLE_END
        return _one_cycle(step, taken, spec, _require_total_steps(spec, total_steps), ONE_CYCLE_START, 1.0, end)
    warmup = spec.warmup * _require_total_steps(spec, total_steps) if 0 < spec.warmup < 1 else spec.warmup
    at = taken if spec.warmup >= 1 else step
    if at < warmup:
        return (at + 1) / math.ceil(warmup)
    if spec.name == "constant":
        return 1.0
    total, warmup = _require_total_steps(spec, total_steps), _scale_steps(warmup, step, at)
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    share = _half_cosine(progress) if spec.name == "cosine" else 1.0 - progress
    return spec.final + (1.0 - spec.final) * share


def compute_momentum(
    step: float, spec: ScheduleSpec, total_steps: int | None, num_taken: float | None = None
) -> float | None:
    """One-cycle's momentum: low where the rate is high; None for other schedules.

    arXiv:1803.09820, section 4.3, with the bounds of PyTorch and fastai.
    """
    if spec.name != "one_cycle":
        return None
    taken = step if num_taken is None else num_taken
    return _one_cycle(
        step, taken, spec, _require_total_steps(spec, total_steps), MOMENTUM_HIGH, MOMENTUM_LOW, MOMENTUM_HIGH
    )


def needs_total_steps(spec: ScheduleSpec) -> bool:
    """Whether the schedule needs the number of steps of the run."""
    return spec.name != "constant" or 0 < spec.warmup < 1


def is_schedule_active(spec: ScheduleSpec) -> bool:
    """Whether any step has another rate than the optimiser's own."""
    return spec.name != "constant" or spec.warmup > 0


def resolve_total_steps(spec: TrainSpec, steps_per_epoch: int | None) -> int | None:
    """The length of the schedule: its own `total_steps`, or the nearest end in `stop`.

    steps_per_epoch: None if the data has no length

    Returns None if unknown. Raises ConfigError when the schedule needs it, and for a warm-up as long as the run.
    """
    schedule, stop = spec.schedule, spec.stop
    ends = [each for each in (schedule.total_steps or stop.steps,) if each is not None]
    if schedule.total_steps is None and stop.epochs is not None and steps_per_epoch is not None:
        ends.append(epochs_to_steps(stop.epochs, steps_per_epoch))
    if ends:
        total = min(ends)
        if schedule.warmup >= max(total, 1):
            problem = f"is as long as the run, of {total} steps: it would never learn at its full rate"
            remedy = "shorten it, or let the run go on for longer"
            raise ConfigError("schedule.warmup", schedule.warmup, problem, remedy)
        return total
    if not needs_total_steps(schedule):
        return None
    by_epochs = spec.stop.epochs is not None
    problem = "the data does not know its length, so epochs have none in steps" if by_epochs else "no end is known"
    others = "" if by_epochs else " or stop.epochs"
    remedy = f"give schedule.total_steps, stop.steps{others}, which {schedule.name} needs"
    raise ConfigError("schedule.total_steps", None, problem, remedy)


def compute_schedule_position(
    spec: TrainSpec, step: int, epoch_steps: float | None, steps_per_epoch: int | None
) -> SchedulePosition:
    """The position after `step` steps.

    epoch_steps: the finished epochs in steps of the present batch size; None as steps_per_epoch

    Raises ConfigError when the schedule needs an end and none is known.
    """
    by_steps = SchedulePosition(step, resolve_total_steps(spec, steps_per_epoch))
    stop = spec.stop
    if spec.schedule.total_steps is not None or stop.epochs is None or steps_per_epoch is None or epoch_steps is None:
        return by_steps
    total = epochs_to_steps(stop.epochs, steps_per_epoch)
    if stop.steps is not None and stop.steps - step < total - epoch_steps:
        return SchedulePosition(step, stop.steps)
    return SchedulePosition(epoch_steps, total)


def _require_total_steps(spec: ScheduleSpec, total_steps: int | None) -> int:
    if total_steps is None:
        raise ConfigError("schedule.total_steps", None, f"{spec.name} needs the number of steps", "give stop.steps")
    return total_steps


def _half_cosine(progress: float) -> float:
    """From 1 at 0 to 0 at 1."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _scale_steps(num_steps: float, step: float, taken: float) -> float:
    """Scale `num_steps` of the `taken` steps, which equal `step` of the present batch size, by the average."""
    return num_steps if taken in (0, step) else num_steps * step / taken


def _one_cycle(
    step: float, taken: float, spec: ScheduleSpec, total: int, start: float, peak: float, end: float
) -> float:
    """`start` at step 0, `peak` after the warm-up, `end` at the last step; cosines between (arXiv:1708.07120)."""
    warmup = spec.warmup or ONE_CYCLE_WARMUP
    rise = (warmup * total if warmup < 1 else warmup) - 1.0
    last = max(total - 1.0, 1.0)
    at = taken if warmup >= 1 else step
    if at < rise:
        return peak + (start - peak) * _half_cosine(at / rise)
    rise = _scale_steps(rise, step, at)
    if rise >= last:
        return peak
    return end + (peak - end) * _half_cosine(min((step - rise) / (last - rise), 1.0))
