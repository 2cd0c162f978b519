"""The sections of a report on a population or a sweep. Reads the record; empty for other runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from shoal.errors import MissingExtra
from shoal.runs.formatting import format_number, format_value
from shoal.runs.lineage import ROUND, Lineage, Stretch
from shoal.runs.report import plots, population_plots, sweep_plots
from shoal.runs.run_reader import Run
from shoal.runs.sweep_trials import SWEEPING, Sweep, load_sweep

if TYPE_CHECKING:
    from pandas import DataFrame

POPULATION = "population"  # the event that begins a population
PREFIXES = ("member/", "trial-")  # of metrics that these sections show
MAX_PATHS, MAX_ROWS = 12, 100


@dataclass(frozen=True)
class Section:
    """A heading with figures, as SVG, and a table. Cells of numbers are right-aligned."""

    title: str
    note: str
    figures: Sequence[str] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def build_search_sections(run: Run) -> list[Section]:
    """Of the run, as it stands."""
    events = run.list_events(POPULATION, ROUND, SWEEPING)
    kinds = {kind for kind, _ in events}
    if SWEEPING in kinds:
        return _build_sweep_sections(load_sweep(run), _find_logarithmic(run.spec))
    lineage = Lineage.from_events(events)
    settings = [details for kind, details in events if kind == POPULATION]
    if not settings or not lineage.num_rounds:
        return []
    metric, higher_is_better = settings[-1]["metric"], settings[-1]["is_higher_better"]
    return _build_population_sections(lineage, metric, higher_is_better, _find_logarithmic(run.spec))


def _find_logarithmic(spec: str) -> set[str] | None:
    """The hyper-parameters that a recorded spec (YAML) searches over their logarithm; None if it has no space."""
    fields = yaml.safe_load(spec)
    space = fields.get("space") if isinstance(fields, dict) else None
    return {path for path, word in space.items() if str(word).startswith("log")} if space else None


def find_best(lineage: Lineage, higher_is_better: bool) -> tuple[int, int] | None:
    """(member, round) of the best score of all rounds, the earliest of equal ones; None without a score."""
    sign = 1.0 if higher_is_better else -1.0
    scored = [
        (-sign * score, details["round"], member)
        for details in lineage.rounds
        for member, score in enumerate(details["scores"])
        if score is not None
    ]
    if not scored:
        return None
    _, number, member = min(scored)
    return member, number


def _build_population_sections(
    lineage: Lineage, metric: str, higher_is_better: bool, logarithmic: set[str] | None
) -> list[Section]:
    best = find_best(lineage, higher_is_better)
    if best is None:
        return []
    member, number = best
    traced = lineage.trace_ancestry(member, number)
    stretches, ancestry = _to_frame(lineage.list_stretches()), _to_frame(traced)
    lines = [stretch for each in lineage.list_present() for stretch in lineage.trace_ancestry(each)]
    survivors = _to_frame(list({(each.member, each.begin, each.end): each for each in lines}.values()))
    copies, paths = len(lineage.list_copies()), lineage.paths[:MAX_PATHS]
    line = f"in blue the ancestors of member {member} after round {number}, the best"
    genealogy = population_plots.draw_genealogy(stretches, survivors, ancestry, lineage.restarts)
    schedules = population_plots.draw_schedules(stretches, ancestry, paths, logarithmic)
    return [
        Section("Members", f"{metric}; {line}; dashed the median", [_draw_members(lineage, traced, metric)]),
        Section(
            "Genealogy",
            f"{copies:,} copies in {lineage.num_rounds:,} rounds; {line}; dark what survives",
            [plots.to_svg(genealogy)],
        ),
        Section("Schedules that were found", line, [plots.to_svg(schedules)]),
        _build_member_table(lineage, metric, higher_is_better),
    ]


def _draw_members(lineage: Lineage, ancestry: Sequence[Stretch], metric: str) -> str:
    import pandas

    numbers = [details["round"] for details in lineage.rounds]
    scores = pandas.DataFrame([details["scores"] for details in lineage.rounds], index=numbers, dtype=float)
    best = {
        details["round"]: details["scores"][stretch.member]
        for stretch in ancestry
        for details in lineage.rounds
        if stretch.begin < details["round"] <= stretch.end
    }
    return plots.to_svg(population_plots.draw_member_metric(scores, pandas.Series(best, dtype=float), metric))


def _build_member_table(lineage: Lineage, metric: str, higher_is_better: bool) -> Section:
    """Members by their newest score, with their newest hyper-parameters."""
    last, copies = lineage.rounds[-1], lineage.list_copies()
    sign = -1.0 if higher_is_better else 1.0
    scores = [math.nan if score is None else score for score in last["scores"]]
    order = sorted(range(len(scores)), key=lambda each: (math.isnan(scores[each]), sign * scores[each]))
    rows = []
    for member in order[:MAX_ROWS]:
        values = [format_value(last["hyper_parameters"][path][member]) for path in lineage.paths]
        num_copied = sum(each == member for _, _, each in copies)
        rows.append([str(member), format_number(scores[member]), *values, str(num_copied)])
    header = ["member", metric, *lineage.paths, "copied"]
    return Section("Members after the last round", "copied: how often by others", header=header, rows=rows)


def _to_frame(stretches: Sequence[Stretch]) -> DataFrame:
    import pandas

    return pandas.DataFrame(
        [
            {"member": each.member, "begin": each.begin, "end": each.end, "source": each.source, **each.values}
            for each in stretches
        ]
    )


def _build_sweep_sections(sweep: Sweep, logarithmic: set[str] | None) -> list[Section]:
    import pandas

    paths = list(dict.fromkeys(path for trial in sweep.trials for path in trial.parameters))[:MAX_PATHS]
    if not paths:
        return []
    numbers = [trial.number for trial in sweep.trials]
    parameters = pandas.DataFrame(
        [[trial.parameters.get(path) for path in paths] for trial in sweep.trials], index=numbers, columns=paths
    )
    scores = pandas.Series([trial.get_score(sweep.metric) for trial in sweep.trials], index=numbers, dtype=float)
    drawn = sweep_plots.draw_parallel_coordinates(
        parameters, scores, sweep.metric, higher_is_better=sweep.is_higher, logarithmic=logarithmic
    )
    trials = f"{len(numbers):,} of {sweep.num_trials:,} trials; the bluer, the better"
    return [
        Section("Trials", trials, [plots.to_svg(drawn)]),
        _build_importance(parameters, scores),
        _build_trial_table(sweep, paths),
    ]


def _build_importance(parameters: DataFrame, scores: Any) -> Section:
    title = "Importance of the parameters"
    try:
        importance = sweep_plots.compute_importance(parameters, scores)
    except MissingExtra as error:
        return Section(title, str(error))
    if importance is None:
        return Section(title, f"needs {sweep_plots.MIN_TRIALS} trials with different scores")
    method = "variance explained by each alone, by fANOVA of a random forest"
    return Section(title, method, [plots.to_svg(sweep_plots.draw_importance(importance))])


def _build_trial_table(sweep: Sweep, paths: Sequence[str]) -> Section:
    ranked = sweep.rank()
    others = [trial for trial in sweep.trials if trial not in ranked]
    rows = [
        [
            str(trial.number),
            trial.state.value,
            format_number(trial.get_score(sweep.metric)),
            *(format_value(trial.parameters.get(path, "")) for path in paths),
            trial.run_id,
        ]
        for trial in [*ranked, *others][:MAX_ROWS]
    ]
    shown = f"the first {MAX_ROWS} of {len(sweep.trials):,}" if len(sweep.trials) > MAX_ROWS else "best first"
    return Section("All trials", shown, header=["trial", "state", sweep.metric, *paths, "run"], rows=rows)
