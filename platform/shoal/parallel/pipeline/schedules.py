"""The pipeline schedules of torch.distributed.pipelining by Shoal's names: their requirements and their order of work.

Called by `model`, which runs them, and by `simulate`, which predicts them. Forms no group and runs nothing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from shoal.errors import PlanError
from shoal.parallel.spec import ScheduleName

SCHEDULE_CLASSES: dict[ScheduleName, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
SINGLE_STAGE = ("gpipe", "1f1b")  # one stage for each rank; the others have two
V_SHAPED = ("zbv", "dualpipev")  # the first rank has the first and the last stage, and so on inwards
SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv", "dualpipev")  # separate gradients of inputs and of weights
IN_ROUNDS = ("interleaved_1f1b", "interleaved_zero_bubble")  # work in rounds of about one micro-batch for each rank


class ComputeAction(NamedTuple):
    """One action of a rank: `F`orward, full `B`ackward, or separate backward of `I`nputs and of `W`eights."""

    stage: int
    kind: Literal["F", "B", "I", "W"]
    micro_batch: int


def get_stage_ranks(schedule: ScheduleName, num_ranks: int) -> list[int]:
    once = list(range(num_ranks))
    if schedule in SINGLE_STAGE:
        return once
    return once + (once[::-1] if schedule in V_SHAPED else once)


def check_schedule(schedule: ScheduleName, num_ranks: int, micro_batches: int, is_sharded: bool = False) -> None:
    """Raises PlanError when the schedule does not support so many ranks and micro-batches, or sharded stages."""
    if is_sharded and schedule in SPLIT_BACKWARD:
        problem = f"the schedule {schedule} splits the backward pass, in which FSDP2 could not gather parameters"
        raise PlanError("parallel.shard", True, problem, "use schedule=1f1b, or shard=false")
    num_stages = len(get_stage_ranks(schedule, num_ranks))
    least = num_stages if schedule in ("1f1b", "dualpipev") else 1
    if micro_batches < least:
        problem = f"the schedule {schedule} needs one for each of its {num_stages} stages"
        raise PlanError("parallel.micro_batches", micro_batches, problem, f"use {least} or more")
    rounds = max(1, micro_batches // num_ranks)
    if schedule in IN_ROUNDS and micro_batches % rounds:
        problem = f"the schedule {schedule} cannot divide them into {rounds} rounds"
        raise PlanError("parallel.micro_batches", micro_batches, problem, f"use a multiple of {num_ranks}")


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
