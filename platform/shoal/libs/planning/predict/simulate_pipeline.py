"""How long the ranks of a pipeline wait for each other: simulates a step's schedule with given times.

Pure arithmetic over the order of torch's own schedules. Called by `predict` and `fake_plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from torch import nn

from shoal.extend.parallel import SCHEDULE_CLASSES, SINGLE_STAGE, ScheduleName, check_schedule, get_stage_ranks


class ComputeAction(NamedTuple):
    """One action of a rank: `F`orward, full `B`ackward, or separate backward of `I`nputs and of `W`eights."""

    stage: int
    kind: Literal["F", "B", "I", "W"]
    micro_batch: int


@dataclass(frozen=True)
class TransferTime:
    """The seconds of one tensor from rank to rank: neither the sender nor the receiver computes meanwhile.

    transit_s: from the end of the sending until a waiting receiver can read it
    """

    send_s: float = 0.0
    transit_s: float = 0.0
    take_s: float = 0.0


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step.

    step_s:     from the first action to the end of the last
    busy_s:     the computing time of each rank
    idle_share: the share of the ranks' time in which they wait
    """

    step_s: float
    busy_s: list[float]

    @property
    def idle_share(self) -> float:
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.step_s)


def simulate_step(
    schedule: ScheduleName,
    num_ranks: int,
    micro_batches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    messages: Sequence[TransferTime] = (),
    between_s: float = 0.0,
) -> SimulatedStep:
    """One step of the schedule.

    forward_s, backward_s: of each stage and micro-batch; two stages for each rank if the schedule has two
    messages:              of each stage's output or gradient to another rank; (): instantaneous
    between_s:             the schedule's own time between two actions of a rank

    Raises PlanError when the schedule does not support so many ranks and micro-batches.
    """
    ranks = get_stage_ranks(schedule, num_ranks)
    waiting = [list(reversed(works)) for works in plan_actions(schedule, num_ranks, micro_batches)]
    free_s, busy_s = [0.0] * num_ranks, [0.0] * num_ranks
    done_s: dict[ComputeAction, float] = {}
    last = len(ranks) - 1
    while any(waiting):
        before = len(done_s)
        for rank, works in enumerate(waiting):
            while works:
                heard = _find_input_ready(works[-1], done_s, ranks, last, messages)
                if heard is None:
                    break
                work = works.pop()
                lasts_s = _duration_s(work, forward_s, backward_s)
                began_s = max(free_s[rank] + between_s, heard.ready_s) + heard.take_s
                done_s[work] = free_s[rank] = began_s + lasts_s
                to = work.stage + 1 if work.kind == "F" else work.stage - 1  # which gets the action's result
                if work.kind != "W" and 0 <= to <= last:
                    free_s[rank] += _get_transfer(work.stage, to, ranks, messages).send_s
                busy_s[rank] += lasts_s
        assert len(done_s) > before, "the schedule waits for itself"
    return SimulatedStep(max(free_s), busy_s)


class _InputReady(NamedTuple):
    """When an action's input from other stages is ready, and how long receiving it takes."""

    ready_s: float
    take_s: float


def _find_input_ready(
    work: ComputeAction,
    done_s: dict[ComputeAction, float],
    ranks: Sequence[int],
    last: int,
    messages: Sequence[TransferTime],
) -> _InputReady | None:
    """None while unknown."""
    if work.kind == "W" or (work.kind == "F" and work.stage == 0) or (work.kind != "F" and work.stage == last):
        return _InputReady(0.0, 0.0)  # the rank's own order ensures it
    needed = [work._replace(stage=work.stage - 1)]
    if work.kind != "F":
        needed = [work._replace(stage=work.stage + 1, kind="B"), work._replace(stage=work.stage + 1, kind="I")]
    for each in needed:
        if each in done_s:
            message = _get_transfer(each.stage, work.stage, ranks, messages)
            return _InputReady(done_s[each] + message.send_s + message.transit_s, message.take_s)
    return None


def _get_transfer(one: int, other: int, ranks: Sequence[int], messages: Sequence[TransferTime]) -> TransferTime:
    """The message between two neighbours."""
    stays = not messages or ranks[one] == ranks[other]
    return TransferTime() if stays else messages[min(one, other)]


def _duration_s(work: ComputeAction, forward_s: Sequence[float], backward_s: Sequence[float]) -> float:
    if work.kind == "F":
        return forward_s[work.stage]
    if work.kind == "B":
        return backward_s[work.stage]
    if work.stage == 0:  # without gradients of inputs: all of the backward pass is for the weights
        return backward_s[0] if work.kind == "W" else 0.0
    return backward_s[work.stage] / 2  # half is for the weights' gradients, where a schedule splits it


def plan_actions(schedule: ScheduleName, num_ranks: int, micro_batches: int) -> list[list[ComputeAction]]:
    """Each rank's actions in order, as the schedule's own class plans them."""
    check_schedule(schedule, num_ranks, micro_batches)
    if schedule == "1f1b":  # torch 2.13 runs it from code; its displayed order starts the last rank with 1 for 0
        return [_plan_1f1b(rank, num_ranks, micro_batches) for rank in range(num_ranks)]
    ranks = get_stage_ranks(schedule, num_ranks)
    sizes = {"num_stages": len(ranks), "group_size": num_ranks, "group_rank": 0, "submod": nn.Identity()}
    stages = [SimpleNamespace(**sizes, stage_index=stage) for stage, rank in enumerate(ranks) if rank == 0]
    planned = SCHEDULE_CLASSES[schedule](stages[0] if schedule in SINGLE_STAGE else stages, micro_batches)
    orders = (planned.pipeline_order[rank] for rank in range(num_ranks))
    return [[work for action in order for work in _flatten_action(action)] for order in orders]


def _plan_1f1b(rank: int, num_ranks: int, micro_batches: int) -> list[ComputeAction]:
    ahead = min(micro_batches, num_ranks - rank)
    works = [ComputeAction(rank, "F", index) for index in range(ahead)]
    for index in range(micro_batches):
        works.append(ComputeAction(rank, "B", index))
        if ahead + index < micro_batches:
            works.append(ComputeAction(rank, "F", ahead + index))
    return works


def _flatten_action(action: Any) -> list[ComputeAction]:
    if action is None:
        return []
    if action.sub_actions is not None:
        return [work for each in action.sub_actions for work in _flatten_action(each)]
    if not action.is_compute_op:
        return []
    return [ComputeAction(action.stage_index, action.computation_type.value, action.microbatch_index)]
