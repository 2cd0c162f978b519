"""`shoal compare`: runs side by side, as a table and a plot.

Parse, call, print: reads the run record; writes only the plot.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Column as TableColumn
from rich.table import Table
from rich.text import Text

from shoal.errors import ConfigError
from shoal.extend.cli import make_table, print_json
from shoal.extend.runs import format_duration, format_number
from shoal.runs import load

if TYPE_CHECKING:
    from shoal.extend.train import TargetReached
    from shoal.libs.comparison.columns import Column


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN...")
@click.option("--metric", default=None, help="The metric to judge by; default: that of most of the runs.")
@click.option("--target", default=None, metavar="METRIC=VALUE", help="Show when and at what cost it was reached.")
@click.option("--plot", "plot", type=click.Path(path_type=Path), default=None, help="The file of the plot.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def compare(runs: tuple[str, ...], metric: str | None, target: str | None, plot: Path | None, as_json: bool) -> None:
    """Put RUNs side by side: their results, duration, and cost in money, memory and communication.

    Time between two attempts of a run (stopped, and resumed later) is not counted. With --target, time and cost to a
    value by DAWNBench's rules: the training steps up to the evaluation in which it was first met.

    \b
    Examples:
      shoal compare 20261120-0645 20261120-0712
      shoal compare 20261120-0645 20261120-0712 --target accuracy=0.9
      shoal compare latest 20261120-0645 --metric validation/loss --plot runs.png --json
    """
    from shoal.libs.comparison.columns import build_column, find_common_metric

    records = list({run.id: run for run in map(load, runs)}.values())
    if len(records) < 2:
        raise ConfigError("run", " ".join(runs), "is one run", "name two or more: `shoal runs` lists them")
    columns = [build_column(run, metric or find_common_metric(records)) for run in records]
    if metric and not any(column.headline for column in columns):
        known = sorted({name for run in records for name in run.latest()})
        raise ConfigError("--metric", metric, "is in none of these runs", f"they have {', '.join(known)}")
    reached = [_find_reached(column, target) if target else None for column in columns]
    path = _save_plot(columns, plot)
    if as_json:
        print_json({"runs": list(map(_to_dict, columns, reached)), "plot": str(path)})
        return
    console = Console(highlight=False)
    console.print(_build_table(columns, reached, target))
    if any(column.predicted for column in columns):
        click.echo("~ predicted, and not measured in that run")
    click.echo(f"The picture: {path}")


def _find_reached(column: Column, target: str) -> TargetReached | None:
    """The run's first evaluation that met the target. Raises ConfigError for an invalid target."""
    from shoal.extend.train import StopSpec, TargetSpec, find_attempts, find_target_reached, get_evaluations

    name, separator, value = target.partition("=")
    if separator and name[-1:] not in ("<", ">"):
        try:
            wanted = TargetSpec(metric=name.strip(), value=float(value))
        except ValueError as error:
            raise ConfigError("--target", target, str(error), "for example --target accuracy=0.9") from None
    else:
        if not separator:
            raise ConfigError("--target", target, "is not METRIC=VALUE", "for example --target accuracy=0.9")
        parsed = StopSpec.parse({"target": target}).target
        assert parsed is not None
        wanted = parsed
    metrics = column.run.metrics()
    logged = next((each for each in (f"validation/{wanted.metric}", wanted.metric) if each in metrics), wanted.metric)
    lives = find_attempts(column.run.events(), column.workers or 1)
    return find_target_reached(get_evaluations(metrics, logged), wanted, lives, column.price_per_device_hour)


def _save_plot(columns: list[Column], plot: Path | None) -> Path:
    from shoal.extend.runs import to_png
    from shoal.libs.comparison.columns import plot_comparison

    path = plot or columns[0].run.folder / "comparison.png"
    drawn = to_png(plot_comparison(columns, [f"{column.run.id} {column.run.title}" for column in columns]))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(drawn)
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
        raise ConfigError("--plot", str(path), problem, "name a file in a folder where you may write") from None
    return path


def _to_dict(column: Column, reached: TargetReached | None) -> dict[str, object]:
    run, headline = column.run, column.headline
    facts: dict[str, object] = {
        "id": run.id,
        "job": run.job,
        "title": run.title,
        "status": run.status.value,
        "plan": column.plan,
    }
    facts["workers"] = column.workers
    facts["best"] = {"name": headline[0], "value": headline[1]} if headline else None
    if reached is not None:
        facts["target"] = {name: getattr(reached, name) for name in ("step", "value", "training_s", "money")}
    facts["predicted"] = sorted(column.predicted)
    return facts | {name: value for name, value in column.values.items() if math.isfinite(value)}


def _build_table(columns: list[Column], reached: list[TargetReached | None], target: str | None) -> Table:
    from shoal.libs.comparison.columns import ROWS, format_value

    rows = [
        ["job", *(column.run.title for column in columns)],
        ["status", *(column.run.status.value for column in columns)],
        ["plan", *(column.plan for column in columns)],
        ["workers", *(str(column.workers or "-") for column in columns)],
    ]
    metric = next((column.headline[0] for column in columns if column.headline), "")
    best = [format_number(column.headline[1]) if column.headline else "-" for column in columns]
    rows.append([f"best {metric}", *best])
    if target:
        rows.append(
            [f"time to {target}", *(format_duration(each.training_s) if each else "not reached" for each in reached)]
        )
        rows.append(
            [f"cost to {target}", *(format_number(each.money) if each and each.money else "-" for each in reached)]
        )
    for name, (unit, meaning) in ROWS.items():
        known = [(column, column.values.get(name, math.nan)) for column in columns]
        cells = [
            ("~" if name in column.predicted else "")
            + (format_duration(value) if name == "lived_s" else format_value(value, unit))
            if math.isfinite(value)
            else "-"
            for column, value in known
        ]
        rows.append([meaning, *cells])
    headings = (TableColumn(Text(each.run.id), justify="right", overflow="fold") for each in columns)
    return make_table("", *headings, rows=(row for row in rows if {*row[1:]} != {"-"}))
