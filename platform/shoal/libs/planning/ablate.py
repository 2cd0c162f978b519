"""`shoal ablate`: the contribution of each part of a task to accuracy, time, memory and parameters.

Parse, call, print: `shoal.libs.planning.ablation` trains and counts, in this process. Imports no Ray.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import click
from rich.table import Column, Table
from rich.text import Text

from shoal.config import format_override
from shoal.extend.cli import (
    PRINTED,
    OutputFolder,
    Overrides,
    Positive,
    Printed,
    TaskName,
    Texts,
    make_literal_console,
    make_number_column,
    make_table,
    prepare_output_folder,
    print_and_write,
    verb,
)
from shoal.extend.cost import format_quantity
from shoal.extend.runs import format_number
from shoal.extend.train import choose_metric, fit_locally, spec_from_overrides, validate_run
from shoal.libs.planning.ablation import (
    COSTS,
    MEMORY,
    PARAMETERS,
    STEP_S,
    AblationRun,
    MeanAndDeviation,
    VariantSummary,
    build_variants,
    summarise_variants,
)
from shoal.libs.planning.ablation import ablate as measure

JOB = "ablate"


@verb(**PRINTED)
def ablate(
    task: TaskName,
    overrides: Overrides = (),
    *,
    parts: Annotated[Texts, "--part NAME", "A part to leave out; all of them by default."] = (),
    changes: Annotated[Texts, "--change NAME=A.B=C", "Something to change instead."] = (),
    seeds: Annotated[Positive, "Runs of each."] = 3,
    metric: Annotated[str | None, "The table's metric; default: that of stop, or the first but the loss."] = None,
    out: OutputFolder = None,
) -> Printed:
    """Train TASK in full and without each of its parts, with the same seeds, and show what each part contributes.

    A task names its parts itself (`Task.parts`); `--change` names others. Trains in this process, one after another.

    \b
    Examples:
      shoal ablate lenet stop.epochs=1
      shoal ablate lenet --part normalisation --seeds 5 stop.steps=500
      shoal ablate lenet --change sgd=optimizer.name=sgd --change sgd=optimizer.learning_rate=0.1
    """
    folder = prepare_output_folder(out)

    def say(each: AblationRun) -> None:
        said.append(each)
        told = each.failure or "  ".join(f"{name} {format_number(value)}" for name, value in each.values.items())
        click.echo(f"[{len(said)}/{num_runs}] {each.variant}, seed {each.seed}: {told}", err=True)

    said: list[AblationRun] = []
    with redirect_stdout(sys.stderr):  # a Task's own output is not part of the result
        spec = spec_from_overrides([format_override("task", task), *overrides]).model_copy(update={"workers": 1})
        variants = build_variants(spec, parts, changes)
        judged = choose_metric(validate_run(spec).metric_names, spec, metric)
        num_runs = len(variants) * seeds
        measured = measure(variants, seeds, lambda each: fit_locally(each, JOB, registers=False, renews=False), say)
    results = summarise_variants(measured)
    summaries = [
        {"is_whole" if name == "is_baseline" else name: value for name, value in asdict(each).items()}
        for each in results
    ]
    values = {"task": task, "variants": summaries, "runs": [asdict(each) for each in measured]}
    lines, stem = _show(results, judged, seeds), f"ablate-{Path(task).name}"
    return print_and_write(folder, stem, lines, values, lambda: {"csv": _to_csv(measured).encode()})


def _show(results: Sequence[VariantSummary], metric: str, seeds: int) -> Iterator[object]:
    console = make_literal_console(soft_wrap=False)
    console.print(_build_table(results, metric, shows_spread=seeds > 1), soft_wrap=not console.is_terminal)
    for summary in results:
        for failure in summary.failures:
            yield Text(f"{summary.name} did not end: {failure}", style="red")
    over = f", mean ± standard deviation over {seeds} seeds, seed by seed" if seeds > 1 else ", with one seed"
    yield f"Below each part's own numbers: their differences from the whole{over}."


def _build_table(summaries: Sequence[VariantSummary], metric: str, *, shows_spread: bool) -> Table:
    """Two lines per part, so that all numbers fit into 80 columns: its own, and their differences from the full
    task."""
    names = (metric, *COSTS)
    spread_of = frozenset(names) - {MEMORY, PARAMETERS} if shows_spread else frozenset[str]()
    rows: list[list[str | Text]] = []
    for summary in summaries:
        own = [_format_spread(summary.values.get(name), name, name in spread_of) for name in names]
        rows.append([Text(summary.name, style="bold" if summary.is_baseline else ""), *own])
        if summary.is_baseline:
            continue
        differences: list[str | Text] = [""]
        for name in names:
            spread = summary.differences.get(name)
            sign = "+" if spread is not None and spread.mean > 0 else ""
            differences.append(Text(sign + _format_spread(spread, name, name in spread_of), style="dim"))
        rows.append(differences)
    numbers = map(make_number_column, (metric, "step", "memory", "parameters"))
    return make_table(Column("variant", no_wrap=True), *numbers, rows=rows)


def _format_spread(spread: MeanAndDeviation | None, name: str, shows_spread: bool) -> str:
    def format_score(value: float) -> str:
        unit = {MEMORY: "bytes", STEP_S: "seconds"}.get(name)
        return format_number(value) if unit is None else format_quantity(value, unit)

    if spread is None:
        return ""
    shown = ("-" if spread.mean < 0 else "") + format_score(abs(spread.mean))
    return f"{shown} ± {format_score(spread.deviation)}" if shows_spread else shown


def _to_csv(measured: Sequence[AblationRun]) -> str:
    """One line per run."""
    names = list(dict.fromkeys(name for each in measured for name in each.values))
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["variant", "seed", *names, "steps", "reason", "run", "failure"])
    for each in measured:
        values = [each.values.get(name, "") for name in names]
        writer.writerow([each.variant, each.seed, *values, each.steps, each.reason, each.run_id, each.failure])
    return text.getvalue()
