"""`shoal find`: a learning rate and a batch size for a task, before training; as tables, plots and JSON.

Parse, call, print: `shoal.libs.planning.finders` does the work, in this process. Imports no Ray.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import click
import numpy as np
from rich.table import Column

from shoal.config import format_override
from shoal.errors import ConfigError
from shoal.extend.cli import (
    PRINTED,
    CommandGroup,
    OutputFolder,
    Overrides,
    Positive,
    Printed,
    TaskName,
    make_number_column,
    make_table,
    prepare_output_folder,
    print_and_write,
)
from shoal.extend.runs import Line, Panel, draw_panels, format_number, format_size, to_png
from shoal.extend.train import Task, TrainSpec, make_task, spec_from_overrides
from shoal.libs.planning.finders import BatchSizeResult, LearningRateResult, find_batch_size, find_learning_rate

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


@find.verb(**PRINTED, work="training at growing rates")
def rate(
    task: TaskName,
    overrides: Overrides = (),
    *,
    lowest: Annotated[float, "The first rate."] = 1e-7,
    highest: Annotated[float, "The last rate."] = 10.0,
    steps: Annotated[int, click.IntRange(min=10), "Steps, one per rate."] = 100,
    out: OutputFolder = None,
) -> Printed:
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
        spec = spec_from_overrides([format_override("task", task), *overrides])
        result = find_learning_rate(spec, lowest, highest, steps)
    return print_and_write(
        folder,
        f"rate-{Path(task).name}",
        _show_rate(result, spec),
        asdict(result),
        lambda: {"png": plot_learning_rate(result, f"{task}: loss by learning rate")},
        task=task,
    )


@find.verb(**PRINTED, work="training with growing batches")
def batch(
    task: TaskName,
    overrides: Overrides = (),
    *,
    memory: Annotated[str | None, "The most to use, as 512M or 2G; default: all that is free."] = None,
    up_to: Annotated[Positive, "The largest to try."] = 65_536,
    longest: Annotated[float, "Stop when a step takes so many seconds."] = 10.0,
    out: OutputFolder = None,
) -> Printed:
    """Find the largest batch of TASK that fits into one worker's memory, and the speed at each size.

    \b
    Examples:
      shoal find batch lenet
      shoal find batch my_task.py:MyTask args.width=512 --memory 2G
    """
    folder = prepare_output_folder(out)
    limit_bytes = None if memory is None else parse_bytes(memory)
    with redirect_stdout(sys.stderr):
        spec = spec_from_overrides([format_override("task", task), *overrides])
        result = find_batch_size(spec, limit_bytes, up_to, longest)
    tried = [{**asdict(each), "samples_per_s": each.samples_per_s} for each in result.tried]
    return print_and_write(
        folder,
        f"batch-{Path(task).name}",
        _show_batch(result),
        {**asdict(result), "tried": tried},
        lambda: {"png": plot_batch_size(result, f"{task}: speed and memory by batch size")},
        task=task,
    )


def parse_bytes(text: str) -> int:
    """512M, 2G, 1.5GiB, 4096. Raises ConfigError."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if matched is None or not float(matched[1]):
        raise ConfigError("--memory", text, "is no amount of memory", "write 512M or 2G")
    return int(float(matched[1]) * _UNITS[matched[2]])


def _show_rate(result: LearningRateResult, spec: TrainSpec) -> Iterator[object]:
    every, rows = max(1, len(result.rates) // NUM_ROWS), []
    for index in range(0, len(result.rates), every):
        near = result.rates[index : index + every]
        mark = "steepest" if result.suggestion in near else "lowest" if result.lowest in near else ""
        losses = (format_number(each[index]) for each in (result.losses, result.smoothed))
        rows.append((f"{result.rates[index]:.2e}", *losses, mark))
    columns = map(make_number_column, ("learning rate", "loss", "smoothed"))
    yield make_table(*columns, Column(no_wrap=True), rows=rows)
    if result.suggestion is None:
        advice = "look at the picture, or try more --steps, a wider sweep, or a larger batch_size"
        yield f"The loss falls nowhere by more than chance: {advice}."
        return
    lowest = f"(lowest loss at {result.lowest:.2g})"
    if type(make_task(spec.task, spec.args)).optimizer is not Task.optimizer:
        yield f"Suggested: {result.suggestion:.2g} {lowest}, in the task's own optimizer()"
    else:
        yield f"Suggested: optimizer.learning_rate={result.suggestion:.2g} {lowest}"


def _show_batch(result: BatchSizeResult) -> Iterator[object]:
    notes, rows = {result.fastest: "fastest", result.largest: "largest"}, []
    for each in result.tried:
        size, memory = f"{each.batch_size:,}", format_size(each.memory_bytes)
        if not each.fits:
            rows.append((size, "", "", memory, "does not fit" if each.was_run else "would not fit"))
            continue
        speed = f"{1e3 * each.step_s:.1f} ms", format_number(round(each.samples_per_s))
        rows.append((size, *speed, memory, notes.get(each.batch_size, "")))
    columns = map(make_number_column, ("batch size", "step", "samples/s", "memory"))
    yield make_table(*columns, Column(no_wrap=True), rows=rows)
    bound = "that was tried; the memory held them all"
    if result.is_limited:
        bound = f"that fits into {format_size(result.limit_bytes)}"
    yield f"Largest {bound}: batch_size={result.largest}. Most samples per second: batch_size={result.fastest}"


def plot_learning_rate(result: LearningRateResult, title: str) -> bytes:
    """A PNG: the loss over the rate, with the suggested rate and the range that is too high."""
    smoothed = np.array(result.smoothed)
    highest = 1.6 * smoothed[0] - 0.6 * smoothed.min()
    lines = [
        Line(label, result.rates, np.where(values < highest, values, np.nan).tolist())  # excludes divergence
        for label, values in (("loss", np.array(result.losses)), ("smoothed", smoothed))
    ]
    marks = [(result.lowest, f"lowest: {result.lowest:.2g}")]
    if result.suggestion is not None:
        marks.append((result.suggestion, f"steepest: {result.suggestion:.2g}"))
    panel = Panel(title="loss", x="learning rate", scale="x", lines=lines, marks=marks)
    return to_png(draw_panels([panel], title))


def plot_batch_size(result: BatchSizeResult, title: str) -> bytes:
    """A PNG: speed and memory over the batch size."""
    fitting, refused = ([each for each in result.tried if each.fits is fits] for fits in (True, False))
    gibibytes = [
        Line(label, [each.batch_size for each in tried], [each.memory_bytes / 2**30 for each in tried])
        for label, tried in (("fits", fitting), ("does not fit", refused))
        if tried
    ]
    speed = Line("speed", [each.batch_size for each in fitting], [each.samples_per_s for each in fitting])
    marks = [(float(result.fastest), f"fastest: {result.fastest:,}")]
    panels = [
        Panel(title="samples per second", x="batch size", scale="x", lines=[speed], marks=marks),
        Panel(title="memory (GiB)", x="batch size", scale="xy", lines=gibibytes),
    ]
    return to_png(draw_panels(panels, title))
