"""How long the ranks of a pipeline wait for one another: a step's schedule, played through with given times.

Pure arithmetic over the order in which torch's own schedules work. Called by `cost`, for its prediction, and by tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.parallel.pipeline_schedules import Work, order, stage_ranks
from shoal.parallel.plan import ScheduleName


@dataclass(frozen=True)
class Bubble:
    """A step as it is played through.

    step_s:     from the first action to the end of the last
    busy_s:     of it, what each rank computes
    idle_share: of the ranks' time, the part in which they wait
    """

    step_s: float
    busy_s: list[float]

    @property
    def idle_share(self) -> float:
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.step_s)


def predict(
    schedule: ScheduleName,
    num_ranks: int,
    micro_batches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: Sequence[float] = (),
    between_s: float = 0.0,
    weight_share: float = 0.5,
) -> Bubble:
    """One step of the schedule.

    forward_s, backward_s: of each stage and micro-batch; two stages for each rank where the schedule has two
    transfer_s:            of what each stage but the last hands on to another rank, or is handed back; (): no time
    between_s:             from one action of a rank to its next, besides waiting: what the schedule itself takes
    weight_share:          of the backward pass, the part for the weights' gradients, where a schedule splits it

    Raises PlanError when the schedule cannot be made of so many ranks and micro-batches.
    """
    ranks = stage_ranks(schedule, num_ranks)
    waiting = [list(reversed(works)) for works in order(schedule, num_ranks, micro_batches)]
    free_s, busy_s = [0.0] * num_ranks, [0.0] * num_ranks
    done_s: dict[Work, float] = {}
    last = len(ranks) - 1
    while any(waiting):
        before = len(done_s)
        for rank, works in enumerate(waiting):
            while works:
                ready_s = _ready_s(works[-1], done_s, ranks, last, transfer_s)
                if ready_s is None:
                    break
                work = works.pop()
                lasts_s = _lasts_s(work, forward_s, backward_s, weight_share)
                done_s[work] = free_s[rank] = max(free_s[rank] + between_s, ready_s) + lasts_s
                busy_s[rank] += lasts_s
        assert len(done_s) > before, "the schedule waits for itself"
    return Bubble(max(free_s), busy_s)


def _ready_s(
    work: Work, done_s: dict[Work, float], ranks: Sequence[int], last: int, transfer_s: Sequence[float]
) -> float | None:
    """When what an action needs from other stages is there; None while nobody knows."""
    if work.kind == "W" or (work.kind == "F" and work.stage == 0) or (work.kind != "F" and work.stage == last):
        return 0.0  # the rank's own order sees to it
    needed = [work._replace(stage=work.stage - 1)]
    if work.kind != "F":
        needed = [Work(work.stage + 1, "B", work.micro_batch), Work(work.stage + 1, "I", work.micro_batch)]
    for each in needed:
        if each in done_s:
            stays = not transfer_s or ranks[each.stage] == ranks[work.stage]
            return done_s[each] + (0.0 if stays else transfer_s[min(each.stage, work.stage)])
    return None


def _lasts_s(work: Work, forward_s: Sequence[float], backward_s: Sequence[float], weight_share: float) -> float:
    if work.kind == "F":
        return forward_s[work.stage]
    if work.kind == "B":
        return backward_s[work.stage]
    if work.stage == 0:  # has no inputs with gradients: all of it is done for the weights
        return backward_s[0] if work.kind == "W" else 0.0
    return backward_s[work.stage] * (weight_share if work.kind == "W" else 1.0 - weight_share)
