"""`shoal ablate`: the contribution of each part of a Task to accuracy, time, memory and parameters.

The full Task is trained, and once without each part, with the same seeds, in this process, one run after another.
Differences are between runs of one seed (the same data order, and the same initial weights where the shapes agree),
which removes the effect of the seed. Imports no Ray; draws nothing.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import click
from rich.table import Column, Table
from rich.text import Text

import shoal.runs
from shoal.config import format_override
from shoal.errors import ConfigError, TrainError
from shoal.extend.cli import (
    PRINTED,
    OutputFolder,
    Overrides,
    Positive,
    Printed,
    TaskName,
    Texts,
    make_number_column,
    make_table,
    prepare_output_folder,
    print_and_write,
    verb,
)
from shoal.extend.cost import format_quantity
from shoal.extend.runs import format_number
from shoal.extend.train import (
    TRAINING_S,
    TrainResult,
    TrainSpec,
    choose_metric,
    find_task,
    fit_locally,
    spec_from_overrides,
    validate_run,
)
from shoal.libs.planning.finders import measure_footprint

JOB = "ablate"
BASELINE = "whole"
STEP_S = "step_s"
MEMORY = "memory_bytes"
PARAMETERS = "parameters"
COSTS = (STEP_S, MEMORY, PARAMETERS)

TrainFunction = Callable[[TrainSpec], TrainResult]


@dataclass(frozen=True)
class Variant:
    """The full Task, or with a part removed or changed."""

    name: str
    spec: TrainSpec


@dataclass(frozen=True)
class AblationRun:
    """One run. values: the metrics of its evaluation, and COSTS; {} with a `failure` if it could not be trained."""

    variant: str
    seed: int
    values: dict[str, float] = field(default_factory=dict)
    run_id: str = ""
    reason: str = ""
    steps: int = 0
    failure: str = ""


@dataclass(frozen=True)
class MeanAndDeviation:
    """mean and standard deviation (0 for one value) over `num` seeds."""

    mean: float
    deviation: float
    num: int

    @classmethod
    def from_values(cls, values: Sequence[float]) -> MeanAndDeviation:
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        return cls(statistics.fmean(values), deviation, len(values))


@dataclass(frozen=True)
class VariantSummary:
    """One variant over all seeds.

    values:      of each quantity
    differences: this variant's value minus the full Task's, seed by seed; {} for the full Task itself
    failures:    the errors of runs that did not end
    """

    name: str
    is_baseline: bool
    values: dict[str, MeanAndDeviation]
    differences: dict[str, MeanAndDeviation]
    failures: tuple[str, ...] = ()


def build_variants(spec: TrainSpec, parts: Sequence[str], changes: Sequence[str]) -> list[Variant]:
    """First the full Task, then without each of `parts` (all if neither is given), then changed.

    parts:   names in `Task.parts`
    changes: `NAME=a.b=c`; several with one name form one variant

    Raises ConfigError for an unknown part, an invalid change, or nothing to compare.
    """
    known: Mapping[str, Mapping[str, object]] = getattr(find_task(spec.task), "parts", {})
    for name in parts:
        if name not in known:
            there = f"the task has {', '.join(known)}" if known else "the task has none: declare Task.parts"
            raise ConfigError("--part", name, "is no part of the task", f"{there}; or use --change NAME=args.x=1")
    chosen = parts or ([] if changes else list(known))
    variants = [Variant(BASELINE, spec)]
    variants += [Variant(name, spec.model_copy(update={"args": {**spec.args, **known[name]}})) for name in chosen]
    changed: dict[str, list[str]] = {}
    for change in changes:
        name, _, override = change.partition("=")
        if "=" not in override or not name:
            raise ConfigError("--change", change, "is not of the form NAME=a.b=c", "for example small=args.width=16")
        changed.setdefault(name, []).append(override)
    variants += [Variant(name, spec.override(overrides)) for name, overrides in changed.items()]
    names = [each.name for each in variants]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ConfigError("--change", sorted(repeated)[0], "is the name of two variants", "give each its own")
    if len(variants) == 1:
        remedy = "declare Task.parts, or give --change NAME=args.x=1"
        raise ConfigError("task", spec.task, "has no parts to compare", remedy)
    return variants


def train_variants(
    variants: Sequence[Variant],
    num_seeds: int,
    train: TrainFunction,
    say: Callable[[AblationRun], None] = lambda _: None,
) -> list[AblationRun]:
    """Train every variant with every seed, from the spec's seed upwards; all are validated before the first is trained.

    say: called with each run as it ends

    Raises ConfigError or PlanError, naming the variant, for one that cannot be trained at all, and errors that affect
    all runs; a run that diverges or does not fit into memory is a result.
    """
    prints = {}
    for variant in variants:
        try:
            validate_run(variant.spec)
            prints[variant.name] = measure_footprint(variant.spec)
        except ConfigError as error:
            problem = f"{error.problem} (in {variant.name!r})"
            raise type(error)(error.field, error.value, problem, error.remedy) from error
    measured = []
    for offset in range(num_seeds):
        for variant in variants:  # in turn within a seed, so that drift of the machine affects all alike
            spec = variant.spec.model_copy(update={"seed": variant.spec.seed + offset})
            run = _run_variant(variant.name, spec, train, *prints[variant.name])
            measured.append(run)
            say(run)
            if run.reason == "interrupted":
                return measured
    return measured


def summarise_variants(measured: Iterable[AblationRun]) -> list[VariantSummary]:
    """Per variant, in order: the spread of each quantity, and of its difference from the full Task with the same
    seed."""
    runs: dict[str, dict[int, AblationRun]] = {}
    for each in measured:
        runs.setdefault(each.variant, {})[each.seed] = each
    baseline = runs[BASELINE]
    summaries = []
    for name, by_seed in runs.items():
        values: dict[str, list[float]] = {}
        differences: dict[str, list[float]] = {}
        for seed, run in by_seed.items():
            for quantity, value in run.values.items():
                values.setdefault(quantity, []).append(value)
                against = baseline[seed].values.get(quantity)
                if name != BASELINE and against is not None:
                    differences.setdefault(quantity, []).append(value - against)
        failures = tuple(run.failure for run in by_seed.values() if run.failure)
        spreads, spreads_of_differences = (
            {quantity: MeanAndDeviation.from_values(each) for quantity, each in numbers.items()}
            for numbers in (values, differences)
        )
        summaries.append(VariantSummary(name, name == BASELINE, spreads, spreads_of_differences, failures))
    return summaries


def _run_variant(
    name: str, spec: TrainSpec, train: TrainFunction, num_parameters: int, memory_bytes: int
) -> AblationRun:
    try:
        outcome = train(spec)
    except TrainError as error:
        return AblationRun(name, spec.seed, failure=f"{type(error).__name__}: {error}")
    training_s = shoal.runs.load(outcome.run_id).latest().get(TRAINING_S, math.nan)
    step_s = training_s / outcome.steps if outcome.steps else math.nan  # without evaluations and checkpoints
    costs = {STEP_S: step_s, MEMORY: float(memory_bytes), PARAMETERS: float(num_parameters)}
    values = {key: value for key, value in {**outcome.metrics, **costs}.items() if math.isfinite(value)}
    return AblationRun(name, spec.seed, values, outcome.run_id, outcome.reason, outcome.steps)


@verb(**PRINTED, work="training without the parts")
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
        measured = train_variants(
            variants, seeds, lambda each: fit_locally(each, JOB, registers=False, renews=False), say
        )
    results = summarise_variants(measured)
    summaries = [
        {"is_whole" if name == "is_baseline" else name: value for name, value in asdict(each).items()}
        for each in results
    ]
    values = {"task": task, "variants": summaries, "runs": [asdict(each) for each in measured]}
    lines, stem = _show(results, judged, seeds), f"ablate-{Path(task).name}"
    return print_and_write(folder, stem, lines, values, lambda: {"csv": _to_csv(measured).encode()})


def _show(results: Sequence[VariantSummary], metric: str, seeds: int) -> Iterator[object]:
    yield _build_table(results, metric, shows_spread=seeds > 1)
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
