"""What is known of one plan: its step time, memory and communication, or why it cannot run. Called by the planners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shoal.cost.cost_table import format_quantity
from shoal.errors import ShoalError, summarize_error
from shoal.libs.planning.candidates import Candidate
from shoal.libs.planning.step_time import StepTime


@dataclass(frozen=True)
class PlanEstimate:
    """One plan. Seconds are NaN and bytes 0 where the plan is not applicable.

    memory_bytes: of a worker
    server_bytes: of a parameter server
    sent_bytes:   of a worker, each step
    problem:      why it cannot run: it does not fit, or is not applicable
    is_run:       whether the numbers come from a run of the model, and not from fake tensors
    """

    candidate: Candidate
    time: StepTime | None = None
    memory_bytes: float = 0.0
    server_bytes: float = 0.0
    sent_bytes: float = 0.0
    problem: str = ""
    is_applicable: bool = True
    is_run: bool = True

    @property
    def is_possible(self) -> bool:
        return not self.problem

    @property
    def step_s(self) -> float:
        return float("inf") if self.time is None else self.time.step_s

    @property
    def reason(self) -> str:
        """Why the plan has its rank, in one line."""
        if self.problem or self.time is None:
            return self.problem
        time = self.time
        parts = [f"compute {_seconds(time.compute_s)}"]
        if time.bubble_s:
            parts.append(f"bubble {_seconds(time.bubble_s)}")
        if self.sent_bytes:
            parts.append(f"communication {_seconds(time.exposed_s)} ({format_quantity(self.sent_bytes, 'bytes')} sent)")
        if time.limit:
            parts.append(f"bound by {time.limit}")
        return ", ".join(parts)


def _seconds(value: float) -> str:
    return format_quantity(value, "seconds")


def estimate_plan(candidate: Candidate, find: Callable[[], PlanEstimate], device_memory: float) -> PlanEstimate:
    """The result of `find`, or why it is not applicable; and whether it fits the memory of a device, in bytes."""
    try:
        found = find()
    except ShoalError as error:
        problem = f"not applicable: {str(error).partition(chr(10))[0]}"
        return PlanEstimate(candidate, problem=problem, is_applicable=False)
    except Exception as error:  # noqa: BLE001 - whatever a user's code raises of batches and parts that it never saw
        problem = f"not applicable: {type(error).__name__}: {summarize_error(error)}"
        return PlanEstimate(candidate, problem=problem, is_applicable=False)
    if found.memory_bytes > device_memory:
        needed, given = (format_quantity(each, "bytes") for each in (found.memory_bytes, device_memory))
        return replace(found, problem=f"does not fit: needs {needed} of {given}")
    return found


def sort_estimates(estimates: Sequence[PlanEstimate]) -> list[PlanEstimate]:
    """The fastest of those that can run first; the least memory first of those that do not fit."""
    return sorted(estimates, key=lambda each: (not each.is_applicable, not each.is_possible, *_order(each)))


def _order(estimate: PlanEstimate) -> tuple[float, float]:
    if estimate.is_possible:
        return estimate.step_s, estimate.memory_bytes
    return estimate.memory_bytes, estimate.step_s
