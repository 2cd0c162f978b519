"""What is known of one plan: its step time, memory and communication, or why it cannot run. Called by the planners."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click

from shoal.config import format_override
from shoal.errors import ShoalError, summarize_error
from shoal.extend.cost import format_quantity
from shoal.extend.train import TrainSpec
from shoal.libs.planning.candidates import Candidate
from shoal.libs.planning.predict.fake_plan import NOTE
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
        compute, bubble, exposed = (
            format_quantity(each, "seconds") for each in (time.compute_s, time.bubble_s, time.exposed_s)
        )
        parts = [f"compute {compute}"]
        if time.bubble_s:
            parts.append(f"bubble {bubble}")
        if self.sent_bytes:
            parts.append(f"communication {exposed} ({format_quantity(self.sent_bytes, 'bytes')} sent)")
        if time.limit:
            parts.append(f"bound by {time.limit}")
        return ", ".join(parts)


def estimate_plan(candidate: Candidate, find: Callable[[], PlanEstimate], device_memory: float) -> PlanEstimate:
    """The result of `find`, or why it is not applicable; and whether it fits the memory of a device, in bytes."""
    try:
        estimate = find()
    except ShoalError as error:
        problem = f"not applicable: {str(error).partition(chr(10))[0]}"
        return PlanEstimate(candidate, problem=problem, is_applicable=False)
    except Exception as error:  # noqa: BLE001 - whatever a user's code raises of batches and parts that it never saw
        problem = f"not applicable: {type(error).__name__}: {summarize_error(error)}"
        return PlanEstimate(candidate, problem=problem, is_applicable=False)
    if estimate.memory_bytes > device_memory:
        needed, given = (format_quantity(each, "bytes") for each in (estimate.memory_bytes, device_memory))
        return replace(estimate, problem=f"does not fit: needs {needed} of {given}")
    return estimate


def sort_estimates(estimates: Sequence[PlanEstimate]) -> list[PlanEstimate]:
    """The fastest of those that can run first; the least memory first of those that do not fit."""

    def order(estimate: PlanEstimate) -> tuple[bool, bool, float, float]:
        costs = estimate.step_s, estimate.memory_bytes
        return not estimate.is_applicable, not estimate.is_possible, *(costs if estimate.is_possible else costs[::-1])

    return sorted(estimates, key=order)


def to_json(estimate: PlanEstimate, spec: TrainSpec) -> dict[str, Any]:
    time = estimate.time
    return {
        "plan": estimate.candidate.name,
        "overrides": list(estimate.candidate.overrides),
        "workers": estimate.candidate.workers,
        "is_synchronous": estimate.candidate.is_synchronous,
        "is_possible": estimate.is_possible,
        "is_applicable": estimate.is_applicable,
        "step_s": time.step_s if time else None,
        "samples_per_s": spec.batch_size / time.step_s if time else None,
        "compute_s": time.compute_s if time else None,
        "communication_s": time.exposed_s if time else None,
        "bubble_s": time.bubble_s if time else None,
        "memory_bytes": estimate.memory_bytes if time else None,
        "server_bytes": estimate.server_bytes if time else None,
        "sent_bytes": estimate.sent_bytes if time else None,
        "reason": estimate.reason,
        "is_run": estimate.is_run,
    }


def describe_plans(estimates: Sequence[PlanEstimate], spec: TrainSpec) -> Iterator[str]:
    """A line for each plan, whose reason is not folded."""
    rows: list[tuple[str, ...]] = [("plan", "workers", "step", "samples/s", "memory", "why")]
    for each in estimates:
        numbers = ["-", "-", "-"]
        if each.is_applicable:
            numbers = [format_quantity(each.step_s, "seconds"), f"{spec.batch_size / each.step_s:,.0f}"]
            numbers.append(format_quantity(each.memory_bytes, "bytes"))
        rows.append((each.candidate.name, str(each.candidate.workers), *numbers, each.reason))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for index, (name, *numbers, reason) in enumerate(rows):
        cells = [name.ljust(widths[0]), *(each.rjust(width) for each, width in zip(numbers, widths[1:], strict=True))]
        is_dim = index == 0 or not estimates[index - 1].is_possible
        yield click.style("  ".join([*cells, reason]), dim=is_dim)


def describe_choice(estimates: Sequence[PlanEstimate], task: str, overrides: Sequence[str]) -> Iterator[str]:
    """The command of the best plan, and of the best one that trains as one process does."""
    if not all(each.is_run for each in estimates):
        yield click.style(f"{NOTE}: times are those of the operations and bytes at the given rates", dim=True)
    possible = [each for each in estimates if each.is_possible]
    if not possible:
        yield click.style("no plan fits: give more devices or device_memory, or a smaller batch_size", fg="yellow")
        return
    best = possible[0]
    yield f"the fastest: {_format_command(best, task, overrides)}"
    exact = next((each for each in possible if each.candidate.is_synchronous), None)
    if exact is not None and exact is not best:
        ratio = f"{exact.step_s / best.step_s:.3g} times its time"
        yield f"with the steps of one process, in {ratio}: {_format_command(exact, task, overrides)}"


def _format_command(estimate: PlanEstimate, task: str, overrides: Sequence[str]) -> str:
    job = [task] if task.isidentifier() else ["train", format_override("task", task)]
    return shlex.join(["shoal", "run", *job, *overrides, *estimate.candidate.overrides])
