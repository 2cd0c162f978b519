"""The panels of a sweep: its best trial, all trials, which parameters mattered, and the score over each.

Importance is the fANOVA of Hutter, Hoos and Leyton-Brown (ICML 2014), estimated by sampling: a random forest predicts
the score from the parameters; a parameter's importance is the variance of the forest's mean prediction over its values,
where all other parameters are drawn as the trials had them, as a share of the variance of all predictions. What
parameters do only together is in none of the shares. The spread is the standard deviation over forests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas

from shoal.errors import MissingExtra, needs_extra
from shoal.extend.runs import (
    Count,
    Line,
    Panel,
    Run,
    RunPanels,
    find_logarithmic,
    format_number,
    is_logarithmic,
)
from shoal.libs.sweep.trials import SWEEPING, build_trial_table, list_best_commands, load_sweep

if TYPE_CHECKING:
    from pandas import DataFrame, Series

MAX_PATHS = 12
MIN_TRIALS = 8  # with fewer the forest knows nothing
NUM_FORESTS = 4
NUM_TREES = 32
NUM_SAMPLES = 128
NUM_VALUES = 16


def build_panels(run: Run) -> list[Panel]:
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
    best = []
    if (trial := sweep.find_best()) is not None:
        note = f"trial {trial.number}, {sweep.metric} {format_number(trial.get_score(sweep.metric))}; to use it:"
        best = [Panel(title="best trial", note=note, commands=list_best_commands(run, trial))]
    table = build_trial_table(sweep, has_runs=True)
    return [
        *best,
        replace(table, note=f"{len(numbers):,} of {sweep.num_trials:,}, best first"),
        build_importance(parameters, scores),
        *draw_scores(parameters, scores, find_logarithmic(run.spec)),
    ]


def build_importance(parameters: DataFrame, scores: Series[float]) -> Panel:
    title, method = "importance of the parameters", "variance explained by each alone, by fANOVA of a random forest"
    try:
        importance = compute_importance(parameters, scores)
    except MissingExtra as error:
        return Panel(title=title, note=str(error))
    if importance is None:
        return Panel(title=title, note=f"needs {MIN_TRIALS} trials with different scores")
    counts = [
        Count(name, share, f"{share:.0%} ± {spread:.0%}") for name, share, spread in importance.itertuples(index=False)
    ]
    return Panel(title=title, note=method, counts=counts)


def compute_importance(parameters: DataFrame, scores: Series[Any]) -> DataFrame | None:
    """Columns parameter, importance (a share of the variance, from 0 to 1) and spread, the largest first.

    Trials without a finite score are left out. None with fewer than MIN_TRIALS others, or where all scores are equal.
    Raises MissingExtra without scikit-learn.
    """
    with needs_extra("recipes"):
        from sklearn.ensemble import RandomForestRegressor

    is_scored = np.isfinite(scores.to_numpy(float))
    columns = [to_numbers(column)[0] for _, column in parameters[is_scored].items()]  # trees need no logarithms
    inputs, targets = np.column_stack(columns), scores[is_scored].to_numpy(float)
    if len(targets) < MIN_TRIALS or np.ptp(targets) == 0:
        return None
    shares = []
    for number in range(NUM_FORESTS):
        rng = np.random.default_rng([0, number])
        forest = RandomForestRegressor(NUM_TREES, random_state=number, min_samples_leaf=2).fit(inputs, targets)
        samples = np.column_stack([rng.choice(column, NUM_SAMPLES) for column in inputs.T])
        total = forest.predict(samples).var()
        shares.append(
            [_compute_marginal_variance(forest, samples, column) / (total or 1.0) for column in range(inputs.shape[1])]
        )
    table = pandas.DataFrame(
        {
            "parameter": list(parameters.columns),
            "importance": np.mean(shares, 0).clip(0, 1),
            "spread": np.std(shares, 0),
        }
    )
    return table.sort_values("importance", ascending=False, kind="stable").reset_index(drop=True)


def draw_scores(parameters: DataFrame, scores: Series[Any], logarithmic: Collection[str] | None) -> Iterator[Panel]:
    """The score over each parameter, a point for each trial.

    logarithmic: the parameters that are drawn over their logarithm; None: those that span decades
    """
    for path, column in parameters.items():
        numbers, options = to_numbers(column)
        order = np.argsort(numbers, kind="stable")
        is_log = not options and is_logarithmic(numbers, str(path), logarithmic)
        words = ", ".join(f"{number}: {option}" for number, option in enumerate(options))
        line = Line("", numbers[order].tolist(), scores.to_numpy(float)[order].tolist(), "points")
        yield Panel(title=f"score by {path}", note=words, x=str(path), scale="x" if is_log else "", lines=[line])


def to_numbers(column: Series[Any]) -> tuple[np.ndarray, list[str]]:
    """Numbers as they are; other values as their number among the distinct ones, which are the second result."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in column):
        return column.to_numpy(float), []
    names = [str(value) for value in column]
    distinct = sorted(set(names))
    return np.array([distinct.index(name) for name in names], float), distinct


def _compute_marginal_variance(forest: Any, samples: np.ndarray, column: int) -> float:
    """Of the forest's mean prediction over the values of a column."""
    values = np.quantile(samples[:, column], (np.arange(NUM_VALUES) + 0.5) / NUM_VALUES, method="nearest")
    repeated = np.tile(samples, (NUM_VALUES, 1))
    repeated[:, column] = np.repeat(values, len(samples))
    predicted: np.ndarray = forest.predict(repeated)
    return float(predicted.reshape(NUM_VALUES, -1).mean(axis=1).var())


PANELS = RunPanels(hidden=("trial-",), opens_on="panels", panels=build_panels)
