"""What `shoal plan` prints: a line for each plan, the command of the best one, and JSON. Called by the command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import click

from shoal.config import format_override
from shoal.cost.cost_table import format_quantity
from shoal.libs.planning.estimate import PlanEstimate
from shoal.libs.planning.predict.fake_plan import NOTE
from shoal.train.spec import TrainSpec


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


def print_plans(found: Sequence[PlanEstimate], spec: TrainSpec) -> None:
    """A line for each plan, whose reason is not folded."""
    rows: list[tuple[str, ...]] = [("plan", "workers", "step", "samples/s", "memory", "why")]
    for each in found:
        numbers = ["-", "-", "-"]
        if each.is_applicable:
            numbers = [format_quantity(each.step_s, "seconds"), f"{spec.batch_size / each.step_s:,.0f}"]
            numbers.append(format_quantity(each.memory_bytes, "bytes"))
        rows.append((each.candidate.name, str(each.candidate.workers), *numbers, each.reason))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for index, (name, *numbers, reason) in enumerate(rows):
        cells = [name.ljust(widths[0]), *(each.rjust(width) for each, width in zip(numbers, widths[1:], strict=True))]
        is_dim = index == 0 or not found[index - 1].is_possible
        click.secho("  ".join([*cells, reason]), dim=is_dim)


def print_choice(found: Sequence[PlanEstimate], task: str, overrides: Sequence[str]) -> None:
    """The command of the best plan, and of the best one that trains as one process does."""
    if not all(each.is_run for each in found):
        click.secho(f"{NOTE}: times are those of the operations and bytes at the given rates", dim=True)
    possible = [each for each in found if each.is_possible]
    if not possible:
        click.secho("no plan fits: give more devices or device_memory, or a smaller batch_size", fg="yellow")
        return
    best = possible[0]
    click.echo(f"the fastest: {_format_command(best, task, overrides)}")
    exact = next((each for each in possible if each.candidate.is_synchronous), None)
    if exact is not None and exact is not best:
        ratio = f"{exact.step_s / best.step_s:.3g} times its time"
        click.echo(f"with the steps of one process, in {ratio}: {_format_command(exact, task, overrides)}")


def _format_command(estimate: PlanEstimate, task: str, overrides: Sequence[str]) -> str:
    job = [task] if task.isidentifier() else ["train", format_override("task", task)]
    return shlex.join(["shoal", "run", *job, *overrides, *estimate.candidate.overrides])
