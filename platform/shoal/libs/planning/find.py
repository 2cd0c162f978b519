"""`shoal find`: a learning rate and a batch size for a task, before training; as tables, plots and JSON.

Parse, call, print: `shoal.libs.planning.tune.finders` does the work, in this process. Imports no Ray.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table

from shoal.cli.support.console import CommandGroup, make_number_column, make_table, strip_task_key
from shoal.cli.support.output_files import prepare_output_folder, to_json_value, write_files
from shoal.config import format_override
from shoal.errors import ConfigError
from shoal.libs.planning.tune.finders import (
    BatchSizeResult,
    BatchTrial,
    LearningRateResult,
    find_batch_size,
    find_learning_rate,
)
from shoal.libs.planning.tune.plots import plot_batch_size, plot_learning_rate
from shoal.runs.formatting import format_number, format_size
from shoal.train.launch.overrides import spec_from_overrides
from shoal.train.spec import TrainSpec
from shoal.train.task import Task, make_task

NUM_ROWS = 12
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@click.group(cls=CommandGroup)
def find() -> None:
    """Find a learning rate or a batch size for a TASK, before training it.

    \b
    Examples:
      shoal find rate lenet
      shoal find batch lenet --memory 2G
    """


@find.command()
@click.argument("task", callback=strip_task_key)
@click.argument("overrides", nargs=-1, metavar="[A.B=C]...")
@click.option("--lowest", default=1e-7, show_default=True, type=float, help="The first rate.")
@click.option("--highest", default=10.0, show_default=True, type=float, help="The last rate.")
@click.option("--steps", default=100, show_default=True, type=click.IntRange(min=10), help="Steps, one per rate.")
@click.option("--out", default=None, type=click.Path(path_type=Path), help="Folder of the files that are written.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def rate(
    task: str, overrides: tuple[str, ...], lowest: float, highest: float, steps: int, out: Path | None, as_json: bool
) -> None:
    """Find a learning rate for TASK: one step at each rate, from low to high (arXiv:1506.01186).

    It suggests the rate at which the loss falls steepest. No run is changed.

    \b
    Examples:
      shoal find rate lenet
      shoal find rate my_task.py:MyTask batch_size=256 optimizer.name=sgd --lowest 1e-5
    """
    if not 0 < lowest < highest:
        raise ConfigError("--lowest", lowest, f"is not between 0 and --highest ({highest:g})")
    folder = prepare_output_folder(out)
    with redirect_stdout(sys.stderr):  # a Task's own output is not part of the result
        spec = _make_spec(task, overrides)
        found = find_learning_rate(spec, lowest, highest, steps)
    if as_json:
        click.echo(json.dumps(to_json_value(asdict(found))))
    else:
        _show_rate(found, spec)
    paths = _write_results(
        folder, "rate", task, plot_learning_rate(found, f"{task}: loss by learning rate"), asdict(found)
    )
    if not as_json:
        _print_paths(paths)


@find.command()
@click.argument("task", callback=strip_task_key)
@click.argument("overrides", nargs=-1, metavar="[A.B=C]...")
@click.option("--memory", default=None, help="The most to use, as 512M or 2G; default: all that is free.")
@click.option("--up-to", default=65_536, show_default=True, type=click.IntRange(min=1), help="The largest to try.")
@click.option("--longest", default=10.0, show_default=True, type=float, help="Stop when a step takes so many seconds.")
@click.option("--out", default=None, type=click.Path(path_type=Path), help="Folder of the files that are written.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def batch(
    task: str,
    overrides: tuple[str, ...],
    memory: str | None,
    up_to: int,
    longest: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Find the largest batch of TASK that fits into one worker's memory, and the speed at each size.

    \b
    Examples:
      shoal find batch lenet
      shoal find batch my_task.py:MyTask args.width=512 --memory 2G
    """
    folder = prepare_output_folder(out)
    limit_bytes = None if memory is None else parse_bytes(memory)
    with redirect_stdout(sys.stderr):
        found = find_batch_size(_make_spec(task, overrides), limit_bytes, up_to, longest)
    if as_json:
        click.echo(json.dumps(to_json_value(_as_dict(found))))
    else:
        _show_batch(found)
    picture = plot_batch_size(found, f"{task}: speed and memory by batch size")
    paths = _write_results(folder, "batch", task, picture, _as_dict(found))
    if not as_json:
        _print_paths(paths)


def parse_bytes(text: str) -> int:
    """512M, 2G, 1.5GiB, 4096. Raises ConfigError."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if matched is None or not float(matched[1]):
        raise ConfigError("--memory", text, "is no amount of memory", "write 512M or 2G")
    return int(float(matched[1]) * _UNITS[matched[2]])


def _make_spec(task: str, overrides: tuple[str, ...]) -> TrainSpec:
    return spec_from_overrides([format_override("task", task), *overrides])


def _write_results(folder: Path, what: str, task: str, picture: bytes, found: dict[str, Any]) -> list[Path]:
    text = json.dumps({"task": task, **to_json_value(found)}, indent=2)
    return write_files(folder, f"{what}-{Path(task).name}", {"png": picture, "json": text.encode()})


def _print_paths(paths: list[Path]) -> None:
    for path in paths:
        click.echo(f"  {path}")


def _as_dict(found: BatchSizeResult) -> dict[str, Any]:
    values = asdict(found)
    for each, row in zip(found.tried, values["tried"], strict=True):
        row["samples_per_s"] = each.samples_per_s
    return values


def _show_rate(found: LearningRateResult, spec: TrainSpec) -> None:
    Console().print(_build_rate_table(found))
    if found.suggestion is None:
        advice = "look at the picture, or try more --steps, a wider sweep, or a larger batch_size"
        click.echo(f"The loss falls nowhere by more than chance: {advice}.")
    elif type(make_task(spec.task, spec.args)).optimizer is not Task.optimizer:
        click.echo(
            f"Suggested: {found.suggestion:.2g} (lowest loss at {found.lowest:.2g}), in the task's own optimizer()"
        )
    else:
        click.echo(f"Suggested: optimizer.learning_rate={found.suggestion:.2g} (lowest loss at {found.lowest:.2g})")


def _show_batch(found: BatchSizeResult) -> None:
    Console().print(_build_batch_table(found))
    bound = (
        f"that fits into {format_size(found.limit_bytes)}"
        if found.is_limited
        else "that was tried; the memory held them all"
    )
    click.echo(f"Largest {bound}: batch_size={found.largest}. Most samples per second: batch_size={found.fastest}")


def _build_rate_table(found: LearningRateResult) -> Table:
    every, rows = max(1, len(found.rates) // NUM_ROWS), []
    for place in range(0, len(found.rates), every):
        near = found.rates[place : place + every]
        mark = "steepest" if found.suggestion in near else "lowest" if found.lowest in near else ""
        losses = (format_number(each[place]) for each in (found.losses, found.smoothed))
        rows.append((f"{found.rates[place]:.2e}", *losses, mark))
    return make_table(*map(make_number_column, ("learning rate", "loss", "smoothed")), Column(no_wrap=True), rows=rows)


def _build_batch_table(found: BatchSizeResult) -> Table:
    columns = (*map(make_number_column, ("batch size", "step", "samples/s", "memory")), Column(no_wrap=True))
    return make_table(*columns, rows=(_make_batch_cells(each, found) for each in found.tried))


def _make_batch_cells(tried: BatchTrial, found: BatchSizeResult) -> list[str]:
    size, memory = f"{tried.batch_size:,}", format_size(tried.memory_bytes)
    if not tried.fits:
        return [size, "", "", memory, "does not fit" if tried.was_run else "would not fit"]
    note = {found.fastest: "fastest", found.largest: "largest"}.get(tried.batch_size, "")
    return [size, f"{1e3 * tried.step_s:.1f} ms", format_number(round(tried.samples_per_s)), memory, note]
