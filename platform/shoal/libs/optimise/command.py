"""`shoal optimise`: smaller versions of a registered model, measured, as a table and a picture; the best is registered.

Parse, call, print: `shoal.libs.optimise.search` does the work, in this process. Imports no Ray.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import Annotated, Any

import click
from rich.table import Column
from rich.text import Text

from shoal.errors import ConfigError, needs_extra
from shoal.extend.cli import (
    PRINTED,
    OutputFolder,
    Overrides,
    Printed,
    Texts,
    make_number_column,
    make_table,
    prepare_output_folder,
    print_and_write,
    verb,
)
from shoal.extend.cost import format_quantity
from shoal.extend.runs import Line, Panel, draw_panels, format_number, format_size, to_png
from shoal.libs.optimise.choice import MaxDrop, find_pareto_front
from shoal.libs.optimise.request import OptimiseRequest
from shoal.libs.optimise.search import Outcome
from shoal.libs.optimise.search import optimise as search
from shoal.libs.optimise.steps import STEPS

NONE = "none"
_COSTS = {
    "latency": ("milliseconds for one sample", 1e3),
    "batch": ("milliseconds for a batch of {batch}", 1e3),
    "size": ("MiB on disk", 2.0**-20),
    "flops": ("MFLOP for one sample", 1e-6),
}


@verb(**PRINTED, work="trying smaller models")
def optimise(
    model: Annotated[str, "MODEL"],
    overrides: Overrides = (),
    *,
    max_drop: Annotated[str, "Of the metric: 1% of its value, or 0.01 in its unit."] = "1%",
    confidence: Annotated[float, "That it drops by no more; 0.5: the measured drop decides."] = 0.95,
    data: Annotated[str, "--data TASK", "The Task that measures and trains; default: the model's own."] = "",
    students: Annotated[
        Texts,
        "--student SPEC",
        "What learns from the model: hidden=64 (its arguments), file.py:Student, or none. Default: half the width.",
    ] = (),
    steps: Annotated[str | None, "--try STEPS", f"Of {','.join(STEPS)}, or none; default: all."] = None,
    metric: Annotated[str, "That may drop; default: that of stop, or the first but the loss."] = "",
    cost: Annotated[Any, "--by", click.Choice(list(_COSTS)), "What is to be small."] = "latency",
    batch: Annotated[int, "Samples of the second latency."] = 32,
    temperature: Annotated[float, "Of the distillation."] = 2.0,
    weight: Annotated[float, "Of the model's answers in a student's loss."] = 0.7,
    name: Annotated[str, "The registered model's name; default: that of MODEL."] = "",
    alias: Annotated[str, "An alias for the registered version."] = "small",
    out: OutputFolder = None,
) -> Printed:
    """Try smaller versions of the registered MODEL, measure each, and register the fastest that is as good.

    Students are trained as any Task, with the overrides A.B=C. The model and each student are tried as they are, in
    int8 and bf16, and as ONNX. Everything is measured after its last step, on one thread of the CPU.

    \b
    Examples:
      shoal optimise fashion@champion --max-drop 1%
      shoal optimise fashion --student narrow=2 --student narrow=3 stop.epochs=3
      shoal optimise ranker --data my_task.py:Ranking --student my_net.py:Small,hidden=64
      shoal optimise text --student none --try int8,onnx-int8 --metric loss --by batch
    """
    if NONE in students and len(students) > 1:
        raise ConfigError("--student", NONE, "is given with others", "leave it out, or the others")
    names: Any = None if steps is None else [each.strip() for each in steps.split(",") if steps != NONE]
    for each in names or ():
        if each not in STEPS:
            raise ConfigError("--try", each, "is no step", f"give some of {', '.join(STEPS)}, or {NONE}")
    request = OptimiseRequest(
        model=model,
        overrides=overrides,
        students=() if students == (NONE,) else students or None,
        steps=None if names is None else tuple(names),
        max_drop=MaxDrop.parse(max_drop),
        confidence=confidence,
        data=data,
        metric=metric,
        cost=cost,
        batch=batch,
        temperature=temperature,
        weight=weight,
        name=name,
        alias=alias,
    )
    with needs_extra("report"):
        import matplotlib  # noqa: F401 - a picture is drawn at the end
    folder = prepare_output_folder(out, "optimised")
    try:
        with redirect_stdout(sys.stderr):  # a Task's own output is not part of the result
            outcome = search(request, lambda line: click.echo(line, err=True))
    except KeyboardInterrupt:
        click.echo("Interrupted; nothing is registered.", err=True)
        sys.exit(128 + signal.SIGINT)
    stem = f"optimise-{outcome.teacher.name}-{outcome.teacher.version}"
    lines, values = _show(outcome, request), _as_dict(outcome)
    return print_and_write(folder, stem, lines, values, lambda: {"png": plot_pareto_front(outcome, request)})


def _show(outcome: Outcome, request: OptimiseRequest) -> Iterator[object]:
    numbers = (outcome.metric, "drop", "1 sample", f"{request.batch} samples", "size", "FLOPs")
    columns = (Column("model", min_width=16, overflow="fold"), *map(make_number_column, numbers), Column(no_wrap=True))
    front = find_pareto_front(outcome.measured, outcome.metric, outcome.is_higher_better, request.cost)
    yield make_table(*columns, rows=(_make_cells(outcome, each, each in front) for each in range(len(outcome.models))))
    for title, problem in outcome.rejected:
        yield Text(f"not tried: {title}: {problem}", style="yellow")
    num_rows = outcome.verdicts[0].num_rows
    if not num_rows:
        yield f"{outcome.metric} is no mean over rows: its measured values decide."
    elif request.confidence > 0.5:
        yield f"{num_rows:,} rows decide, with a confidence of {request.confidence:.4g}."
    if outcome.registered is None:
        yield f"Nothing within {outcome.metric} {format_number(outcome.limit)} is better: {outcome.teacher.ref} stays."
        if any(each.status == "undecided" for each in outcome.verdicts[1:]):
            yield "Some are undecided: validate on more rows, or let the measured drop decide: --confidence 0.5."
        return
    chosen = outcome.registered
    yield f"{chosen.name}@{request.alias} is {chosen.ref} now: {outcome.models[outcome.chosen].title}."
    yield f"Serve it: shoal serve deploy {chosen.ref}"


def _make_cells(outcome: Outcome, index: int, is_on_front: bool) -> list[str]:
    measured, verdict = outcome.measured[index], outcome.verdicts[index]
    drop = format_number(verdict.drop)
    if verdict.low < verdict.high:
        drop += f" ({format_number(verdict.low)} to {format_number(verdict.high)})"
    note = "front" if is_on_front else ""
    if index == outcome.chosen:
        note = "chosen" if index else "stays"
    elif index and verdict.status == "beyond":
        note = "drops too much"
    elif index and verdict.status == "undecided":
        more = verdict.more_rows
        note = "undecided: " + ("at the limit" if more is None else f"{more:,} rows more are needed")
    return [
        outcome.models[index].title,
        format_number(measured.metrics[outcome.metric]),
        drop if index else "",
        format_quantity(measured.latency_s, "seconds"),
        format_quantity(measured.batch_latency_s, "seconds"),
        format_size(measured.size_bytes),
        "" if measured.flops is None else format_quantity(measured.flops, "operations"),
        note,
    ]


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    rows = [
        {
            "steps": list(model.steps),
            "run": model.run_id,
            **asdict(measured),
            "chosen": index == outcome.chosen,
            "verdict": asdict(outcome.verdicts[index]),
        }
        for index, (model, measured) in enumerate(zip(outcome.models, outcome.measured, strict=True))
    ]
    return {
        "model": outcome.teacher.ref,
        "metric": outcome.metric,
        "limit": outcome.limit,
        "models": rows,
        "rejected": [{"steps": title, "problem": problem} for title, problem in outcome.rejected],
        "registered": outcome.registered.ref if outcome.registered else None,
    }


def plot_pareto_front(outcome: Outcome, request: OptimiseRequest) -> bytes:
    """A PNG: each model as a point, the front as a line, the limit of the drop as another."""
    label, scale = _COSTS[request.cost]
    front = find_pareto_front(outcome.measured, outcome.metric, outcome.is_higher_better, request.cost)
    costs = [each.get_cost(request.cost) * scale for each in outcome.measured]
    scores = [each.metrics[outcome.metric] for each in outcome.measured]
    models = [
        Line(f"{model.title} *" if index == outcome.chosen else model.title, [costs[index]], [scores[index]])
        for index, model in enumerate(outcome.models)
    ]
    lines = [
        Line("front", [costs[each] for each in front], [scores[each] for each in front], "muted"),
        Line("limit", [min(costs), max(costs)], [outcome.limit] * 2, "muted"),
    ]
    title = f"{outcome.teacher.ref}: {outcome.metric}; * is chosen"
    x = label.format(batch=request.batch)
    return to_png(draw_panels([Panel(title=title, x=x, scale="x", lines=[*lines, *models])], size_inches=(7.2, 4.2)))
