"""The pipeline schedules of torch.distributed.pipelining by Shoal's names: their classes and requirements.

Called by `model`, which runs them, and by what predicts them. Forms no group and runs nothing.
"""

from __future__ import annotations

from typing import Any

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
