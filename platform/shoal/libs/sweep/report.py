"""The sections of a report on a sweep: its trials, and which parameters mattered."""

from __future__ import annotations

from collections.abc import Sequence

import pandas

from shoal.errors import MissingExtra
from shoal.extend.runs import (
    ReportPanels,
    Run,
    Section,
    build_ranked_table,
    find_logarithmic,
    format_number,
    format_value,
    to_svg,
)
from shoal.libs.sweep import plots
from shoal.libs.sweep.trials import SWEEPING, Sweep, load_sweep

MAX_PATHS = 12


def build_sections(run: Run) -> list[Section]:
    """Of the run as it stands; none before its first trial."""
    if not run.list_events(SWEEPING):
        return []
    sweep = load_sweep(run)
    paths = list(dict.fromkeys(path for trial in sweep.trials for path in trial.parameters))[:MAX_PATHS]
    if not paths:
        return []
    numbers = [trial.number for trial in sweep.trials]
    parameters = pandas.DataFrame(
        [[trial.parameters.get(path) for path in paths] for trial in sweep.trials], index=numbers, columns=paths
    )
    scores = pandas.Series([trial.get_score(sweep.metric) for trial in sweep.trials], index=numbers, dtype=float)
    drawn = plots.draw_parallel_coordinates(
        parameters,
        scores,
        sweep.metric,
        higher_is_better=sweep.is_higher,
        logarithmic=find_logarithmic(run.spec),
    )
    trials = f"{len(numbers):,} of {sweep.num_trials:,} trials; the bluer, the better"
    return [
        Section("Trials", trials, [to_svg(drawn)]),
        _build_importance(parameters, scores),
        _build_trial_table(sweep, paths),
    ]


def _build_importance(parameters: pandas.DataFrame, scores: pandas.Series[float]) -> Section:
    title = "Importance of the parameters"
    try:
        importance = plots.compute_importance(parameters, scores)
    except MissingExtra as error:
        return Section(title, str(error))
    if importance is None:
        return Section(title, f"needs {plots.MIN_TRIALS} trials with different scores")
    method = "variance explained by each alone, by fANOVA of a random forest"
    return Section(title, method, [to_svg(plots.draw_importance(importance))])


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
        for trial in [*ranked, *others]
    ]
    return build_ranked_table("All trials", "best first", ["trial", "state", sweep.metric, *paths, "run"], rows)


PANELS = ReportPanels(hidden=("trial-",), sections=build_sections)
