"""The contribution of each part of a Task: the full Task, and once without each part, with the same seeds.

Called by `shoal ablate`. Differences are between runs of one seed (the same data order, and the same initial weights
where the shapes agree), which removes the effect of the seed. Trains through a given function (`local.fit_locally`),
one run after another; draws nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import shoal.runs
from shoal.errors import ConfigError, TrainError
from shoal.extend.train import TRAINING_S, TrainResult, TrainSpec, find_task, validate_run
from shoal.libs.planning.finders import measure_footprint

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


def ablate(
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
    whole = runs[BASELINE]
    summaries = []
    for name, by_seed in runs.items():
        values: dict[str, list[float]] = {}
        differences: dict[str, list[float]] = {}
        for seed, run in by_seed.items():
            for quantity, value in run.values.items():
                values.setdefault(quantity, []).append(value)
                against = whole[seed].values.get(quantity)
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
