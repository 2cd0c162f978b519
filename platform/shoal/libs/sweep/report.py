"""The sections of a report on a sweep, and its pictures: the trials over all parameters, and which of these mattered.

Pictures take data frames, a row for each trial, a column for each parameter (numbers, texts or booleans); users call
them with frames of their own.

Importance is the fANOVA of Hutter, Hoos and Leyton-Brown (ICML 2014), estimated by sampling: a random forest predicts
the score from the parameters; a parameter's importance is the variance of the forest's mean prediction over its values,
where all other parameters are drawn as the trials had them, as a share of the variance of all predictions. What
parameters do only together is in none of the shares. The spread is the standard deviation over forests.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas

from shoal.errors import MissingExtra, needs_extra
from shoal.extend.runs import (
    INK,
    RULE,
    WIDTH_INCHES,
    Count,
    Panel,
    Run,
    RunPanels,
    encode_picture,
    find_logarithmic,
    format_number,
    is_logarithmic,
    make_figure,
    to_numbers,
    to_svg,
)
from shoal.extend.runs import truncate_middle as shorten
from shoal.libs.sweep.trials import SWEEPING, build_trial_table, list_best_commands, load_sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame, Series

MAX_PATHS = 12
MIN_TRIALS = 8  # with fewer the forest knows nothing
NUM_FORESTS, NUM_TREES, NUM_SAMPLES, NUM_VALUES = 4, 32, 128, 16
MAX_TICKS = 6


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
    drawn = draw_parallel_coordinates(
        parameters, scores, sweep.metric, higher_is_better=sweep.is_higher, logarithmic=find_logarithmic(run.spec)
    )
    picture = encode_picture(to_svg(drawn).encode(), "svg+xml")
    trials = f"{len(numbers):,} of {sweep.num_trials:,} trials; the bluer, the better"
    best = []
    if (trial := sweep.find_best()) is not None:
        note = f"trial {trial.number}, {sweep.metric} {format_number(trial.get_score(sweep.metric))}; to use it:"
        best = [Panel(title="best trial", note=note, commands=list_best_commands(run, trial))]
    return [
        *best,
        Panel(title="trials", note=trials, pictures=[("", picture)]),
        build_importance(parameters, scores),
        build_trial_table(sweep, has_runs=True),
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


def draw_parallel_coordinates(
    parameters: DataFrame,
    scores: Series[Any],
    metric: str,
    *,
    higher_is_better: bool = True,
    logarithmic: Collection[str] | None = None,
) -> Figure:
    """A line for each trial through its parameters to its score: the better the bluer. Trials without one are grey.

    logarithmic: the parameters that are drawn over their logarithm; None: those that span decades
    """
    from matplotlib import colormaps

    names = [*_shorten_names(list(parameters.columns)), metric]
    columns = [*(parameters[path] for path in parameters.columns), scores]
    logs = [is_logarithmic(to_numbers(column)[0], str(path), logarithmic) for path, column in parameters.items()]
    finite = scores[np.isfinite(scores.to_numpy(float))]
    order = finite.sort_values(ascending=higher_is_better, kind="stable").index  # the best is drawn last
    ranks = {index: place for place, index in enumerate(order)}
    colours = dict(zip(order, colormaps["Blues"](np.linspace(0.25, 1.0, len(order))), strict=True))
    with make_figure((WIDTH_INCHES, 3.6), left=0.07, right=0.95, bottom=0.06, top=0.86) as figure:
        axes = figure.add_subplot()
        axes.set_axis_off()
        axes.set_xlim(0, max(len(columns) - 1, 1))
        axes.set_ylim(-0.05, 1.05)
        heights = [
            _draw_axis(axes, place, name, column, is_log)
            for place, (name, column, is_log) in enumerate(zip(names, columns, [*logs, False], strict=True))
        ]
        lines = np.column_stack(heights)
        for row, index in enumerate(parameters.index):
            is_scored = index in colours
            axes.plot(
                range(len(columns)), lines[row], color=colours[index] if is_scored else RULE, linewidth=1.2,
                zorder=2 + ranks[index] / len(ranks) if is_scored else 1,
            )  # fmt: skip
    return figure


def _draw_axis(axes: Axes, x: int, name: str, column: Series[Any], is_log: bool) -> np.ndarray:
    """A vertical axis with its values; the height in [0, 1] of each trial on it."""
    numbers, options = to_numbers(column)
    finite = numbers[np.isfinite(numbers)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    is_log = is_log and not options

    def scale(values: np.ndarray) -> np.ndarray:
        if low == high:
            return np.where(np.isfinite(values), 0.5, np.nan)
        ends = np.log([low, high]) if is_log else np.array([low, high])
        scaled: np.ndarray = ((np.log(values) if is_log else values) - ends[0]) / (ends[1] - ends[0])
        return scaled

    spaced = np.geomspace(low, high, 4) if is_log else np.linspace(low, high, 4)
    shown = np.arange(len(options), dtype=float) if options else np.unique(spaced)
    labels = [shorten(option, 14) for option in options] or [f"{value:.3g}" for value in shown]
    axes.axvline(x, ymin=0.05 / 1.1, ymax=1.05 / 1.1, color=RULE, linewidth=1, zorder=0)
    is_last, every = x > 0 and x == round(axes.get_xlim()[1]), -(-len(shown) // MAX_TICKS)
    for height, label in list(zip(scale(shown), labels, strict=True))[::every]:
        offset, side = (-4, "right") if is_last else (4, "left")
        words = axes.annotate(label, (x, height), (offset, 0), textcoords="offset points", ha=side, va="center")
        words.set(color=INK, fontsize=8, zorder=4)
        words.set_bbox({"color": "white", "alpha": 0.75, "pad": 1, "linewidth": 0})
    side = "right" if is_last else "center" if x else "left"
    longest = max(10, round(100 / (axes.get_xlim()[1] + 1)))
    heading = axes.annotate(shorten(name, longest), (x, 1.09), ha=side, annotation_clip=False)
    heading.set(color=INK, fontweight="bold")
    return scale(numbers)


def _shorten_names(paths: Sequence[str]) -> list[str]:
    """The last part of each path, where no other ends so."""
    ends = [path.rpartition(".")[2] for path in paths]
    return [end if ends.count(end) == 1 else path for path, end in zip(paths, ends, strict=True)]


def _compute_marginal_variance(forest: Any, samples: np.ndarray, column: int) -> float:
    """Of the forest's mean prediction over the values of a column."""
    values = np.quantile(samples[:, column], (np.arange(NUM_VALUES) + 0.5) / NUM_VALUES, method="nearest")
    repeated = np.tile(samples, (NUM_VALUES, 1))
    repeated[:, column] = np.repeat(values, len(samples))
    predicted: np.ndarray = forest.predict(repeated)
    return float(predicted.reshape(NUM_VALUES, -1).mean(axis=1).var())


PANELS = RunPanels(hidden=("trial-",), panels=build_panels)
