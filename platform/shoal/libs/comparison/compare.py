"""`shoal compare`: runs side by side, as tables and a plot.

Parse, call, print: reads the run record; writes only the plot.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import click
import yaml
from rich.table import Column as TableColumn
from rich.table import Table
from rich.text import Text

from shoal.errors import ConfigError, ShoalError
from shoal.extend.cli import PRINTED, Printed, Texts, make_table, verb
from shoal.extend.registry import Registry
from shoal.extend.runs import (
    Run,
    RunKind,
    format_duration,
    format_metric,
    format_number,
    infer_direction,
    is_higher_better,
    truncate_middle,
)
from shoal.libs.comparison.columns import Axis, MetricSummary, find_end, format_position, sort_names, summarize
from shoal.plugins.find import load_reference
from shoal.runs import load
from shoal.search.space import flatten

if TYPE_CHECKING:
    from shoal.extend.train import TargetReached
    from shoal.libs.comparison.columns import Column

MAX_ERROR_CHARS, MAX_SETTING_CHARS = 60, 100


UNKNOWN = "-"
_SPECS = {RunKind.TRAINING: "shoal.extend.train:TrainSpec", RunKind.LOOP: "shoal.extend.flows:ActorLearnerSpec"}
_IGNORED = ("resume",)


@verb(**PRINTED, work="reading the runs")
def compare(
    runs: Annotated[Texts, "RUN|NAME@VERSION..."],
    *,
    by: Annotated[Axis | None, "Default: step, if all have it."] = None,
    metric: Annotated[str | None, "The metric to judge by; default: that of most of the runs."] = None,
    target: Annotated[str | None, "--target METRIC=VALUE", "Show when and at what cost it was reached."] = None,
    plot: Annotated[Path | None, "The file of the picture, a .png."] = None,
    as_csv: Annotated[bool, "--csv", "Print settings and metrics as CSV."] = False,
) -> Printed:
    """Put RUNs side by side: the settings that differ, each metric, their duration and cost.

    Each metric has its last value, its best one, and the one at the step, epoch or time that all runs have reached. The
    run of a registered version is named by it. Time between two attempts of a run (stopped, and resumed later) is not
    counted. With --target, time and cost to a value by DAWNBench's rules: the training steps up to the evaluation in
    which it was first met. `shoal report RUN RUN` writes a page with their curves over each other.

    \b
    Examples:
      shoal compare 20261120-0645 20261120-0712
      shoal compare lenet@1 lenet@2 --by epoch --plot lenet.png
      shoal compare 20261120-0645 20261120-0712 --target accuracy=0.9
      shoal compare latest 20261120-0645 --metric validation/loss --json
    """
    from shoal.libs.comparison.columns import build_column, find_common_metric

    records = list({run.id: run for run in map(_load, runs)}.values())
    if len(records) < 2:
        raise ConfigError("run", " ".join(runs), "is one run", "name two or more: `shoal runs` lists them")
    by = by or ("step" if len({run.kind for run in records}) == 1 else "time")
    columns = [build_column(run, metric or find_common_metric(records), by) for run in records]
    if metric and not any(column.headline for column in columns):
        known = sorted({name for run in records for name in run.latest()})
        raise ConfigError("--metric", metric, "is in none of these runs", f"they have {', '.join(known)}")
    settings, metrics = find_differences(records), MetricTable.build(columns, by)
    reached = [_find_reached(column, target) if target else None for column in columns]
    if as_csv:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["kind", "name", *(column.run.id for column in columns)])
        writer.writerows(["setting", name, *values] for name, values in settings.items())
        for name, row in metrics.rows.items():
            for kind in (each.name for each in fields(MetricSummary)):
                values = ["" if each is None else getattr(each, kind) for each in row]
                writer.writerow([kind, name, *("" if value is None or value != value else value for value in values)])
        click.echo(text.getvalue(), nl=False)
        click.get_current_context().exit()
    tables = [_build_settings(columns, settings), metrics.render(columns), _build_table(columns, reached, target)]
    path = _save_plot(columns, by, plot)
    facts = {"runs": list(map(_to_dict, columns, reached)), "plot": str(path), "settings": settings}
    notes = ["~ predicted, and not measured in that run"] * any(column.predicted for column in columns)
    return Printed(
        [*((table, "") for table in tables), *notes, f"The picture: {path}"],
        {**facts, "by": by, "common_at": metrics.common_at, "metrics": metrics.to_dict()},
    )


def _load(ref: str) -> Run:
    """The run with this id, or the one that made this version of the registry. Raises RunError and RegistryError."""
    if "@" not in ref:
        return load(ref)
    manifest = Registry().get(ref).manifest
    run_id = manifest.lineage.get("run", manifest.run_id)  # of a sweep: the trial's own
    if run_id is None:
        raise ConfigError("run", ref, "was registered by no run", "name runs, or versions that runs have made")
    return load(run_id)


@dataclass(frozen=True)
class MetricTable:
    """The metrics of runs, over one axis. rows: by name, one for each run; None where it has not logged it.
    common_at: the position that all of them have reached, if some have gone further; else NaN"""

    by: Axis
    common_at: float
    rows: dict[str, list[MetricSummary | None]]

    @classmethod
    def build(cls, columns: Sequence[Column], by: Axis) -> Self:
        """Raises ConfigError when no run knows its epochs."""
        ends = [find_end(column.curves) for column in columns if column.curves]
        known = [end for end in ends if math.isfinite(end)]
        if ends and not known:
            raise ConfigError("--by", by, "is known of none of these runs", "use --by step, or --by time")
        is_far = bool(known) and max(known) > 1.01 * min(known) and len(known) == len(columns)
        common_at = min(known) if is_far else math.nan
        headlines = {column.headline[0] for column in columns if column.headline}
        names = sort_names(list({name for column in columns for name in column.curves}))
        names.sort(key=lambda name: name not in headlines)
        rows = {
            name: [
                summarize(name, column.curves[name], common_at) if name in column.curves else None for column in columns
            ]
            for name in names
        }
        return cls(by, common_at, rows)

    def render(self, columns: Sequence[Column]) -> Table:
        """Up to three lines for each metric: its last value, and what is not the same as that."""
        common = f"  at {'' if self.by == 'time' else f'{self.by} '}{format_position(self.common_at, self.by)}"
        lines: list[list[str | Text]] = []
        for name, row in self.rows.items():
            lines.append([name, *("-" if each is None else format_metric(name, each.final) for each in row)])
            known = [each for each in row if each is not None]
            if any(each.best not in (None, each.final) for each in known):
                lines.append([Text("  best", "dim"), *(self._format_best(name, each, row) for each in row)])
            if infer_direction(name) is None or math.isnan(self.common_at):
                continue
            if any(each.common != each.final for each in known):
                cells = (
                    format_metric(name, each.common) if each and each.common == each.common else "-" for each in row
                )
                lines.append([Text(common, "dim"), *cells])
        return _make_run_table(f"metrics by {self.by}", columns, lines)

    def _format_best(self, name: str, each: MetricSummary | None, row: Sequence[MetricSummary | None]) -> Text:
        if each is None or each.best is None:
            return Text("-")
        bests = [other.best for other in row if other is not None and other.best is not None]
        style = "bold green" if each.best == (max if is_higher_better(name) else min)(bests) else ""
        at = f" at {format_position(each.best_at, self.by)}"
        return Text.assemble((format_metric(name, each.best), style), (at, "dim"))

    def to_dict(self) -> dict[str, list[dict[str, float | None] | None]]:
        """By metric, for each run."""
        return {name: [None if each is None else asdict(each) for each in row] for name, row in self.rows.items()}


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


def _save_plot(columns: list[Column], by: Axis, plot: Path | None) -> Path:
    from shoal.extend.runs import draw_panels, to_png
    from shoal.libs.comparison.columns import build_panels

    path = plot or columns[0].run.folder / "comparison.png"
    drawn = to_png(draw_panels(build_panels(columns, by)))
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
        "name": run.name,
        "status": run.status.value,
        "plan": column.plan,
    }
    facts["workers"] = column.workers
    facts["best"] = {"name": headline[0], "value": headline[1]} if headline else None
    if reached is not None:
        facts["target"] = {name: getattr(reached, name) for name in ("step", "value", "training_s", "money")}
    facts["predicted"] = sorted(column.predicted)
    return facts | {name: value for name, value in column.values.items() if math.isfinite(value)}


def _build_settings(columns: Sequence[Column], settings: Mapping[str, Sequence[str]]) -> Table:
    rows = [
        ["name", *(column.run.name for column in columns)],
        ["status", *(_describe_status(column.run) for column in columns)],
    ]
    rows = [row for row in rows if len({*row[1:]}) > 1]
    for name, values in settings.items():
        rows.append([name, *(truncate_middle(value, MAX_SETTING_CHARS) for value in values)])
    heading = "settings that differ" if settings else "no setting differs"
    return _make_run_table(heading, columns, rows)


def _describe_status(run: Run) -> str:
    """Of a run that has failed, the reason too."""
    lines = (run.error or "").splitlines()
    return f"{run.status.value}: {truncate_middle(lines[-1], MAX_ERROR_CHARS)}" if lines else run.status.value


def _make_run_table(heading: str, columns: Sequence[Column], rows: Iterable[Sequence[str | Text]]) -> Table:
    headings = (TableColumn(Text(each.run.id), justify="right", overflow="fold") for each in columns)
    return make_table(heading, *headings, rows=rows)


def _build_table(columns: list[Column], reached: list[TargetReached | None], target: str | None) -> Table:
    from shoal.libs.comparison.columns import ROWS, format_value

    workers = (str(column.workers or "-") for column in columns)
    rows = [["plan", *(column.plan for column in columns)], ["workers", *workers]]
    if target:
        times = (format_duration(each.training_s) if each else "not reached" for each in reached)
        costs = (format_number(each.money) if each and each.money else "-" for each in reached)
        rows += [[f"time to {target}", *times], [f"cost to {target}", *costs]]
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
    return _make_run_table("cost", columns, (row for row in rows if {*row[1:]} != {"-"}))


def find_differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The settings that are not the same in all runs, by name: the value of each. What only one kind of run has is left
    out where runs are of several kinds."""
    specs = _read_specs(runs)
    settings = [
        {path: value if isinstance(value, str) else json.dumps(value) for path, value in flatten(spec)}
        | _describe_origin(run)
        for run, spec in zip(runs, specs, strict=True)
    ]
    result = {}
    for name in dict.fromkeys(name for each in settings for name in each):
        values = [each.get(name, UNKNOWN) for each in settings]
        kinds = {run.kind for run, each in zip(runs, settings, strict=True) if name in each}
        if len(set(values)) > 1 and kinds == {run.kind for run in runs} and name not in _IGNORED:
            result[name] = values
    return result


def _read_specs(runs: Sequence[Run]) -> list[Mapping[str, Any]]:
    """The fields of each run with their defaults; where one cannot be read so, the recorded fields of all."""
    recorded = [yaml.safe_load(run.spec) for run in runs]
    recorded = [each if isinstance(each, dict) else {} for each in recorded]
    try:
        types = [load_reference(_SPECS[run.kind]) if run.kind in _SPECS else None for run in runs]
        return [
            each if kind is None else kind.from_record(run.spec).model_dump(mode="json")
            for run, kind, each in zip(runs, types, recorded, strict=True)
        ]
    except (ShoalError, ValueError):  # of an older release, with secrets, or with an algorithm that is not here
        return recorded


def _describe_origin(run: Run) -> dict[str, str]:
    """The fingerprints of its data, of the files that its spec names, and its git revision, as far as it has them."""
    seen = run.last_events()
    origin = {f"data: {part}": str(found) for part, found in seen.get("data", {}).items()}
    origin |= {f"text of {file}": sha256[:12] for file, sha256 in seen.get("code", {}).items()}
    if run.git_revision:
        origin["git revision"] = run.git_revision[:10] + (" (changed)" if run.git_dirty else "")
    return origin
