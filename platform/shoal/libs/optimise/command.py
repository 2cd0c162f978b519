"""`shoal optimise`: smaller versions of a registered model, measured, as a table and a picture; the best is registered.

Parse, call, print: `shoal.libs.optimise.search` does the work, in this process. Imports no Ray.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Column
from rich.text import Text

from shoal.cli.support.console import make_number_column, make_table
from shoal.cli.support.output_files import prepare_output_folder, to_json_value, write_files
from shoal.cost.cost_table import format_quantity
from shoal.errors import ConfigError, needs_extra
from shoal.libs.optimise.choice import MaxDrop, find_front, is_within
from shoal.libs.optimise.picture import plot_front
from shoal.libs.optimise.request import OptimiseRequest
from shoal.libs.optimise.search import Outcome
from shoal.libs.optimise.search import optimise as search
from shoal.libs.optimise.steps import STEPS
from shoal.runs.formatting import format_number, format_size

COSTS = ("latency", "batch", "size", "flops")
NONE = "none"
FILE_WIDTH = 140


@click.command()
@click.argument("model", metavar="MODEL")
@click.argument("overrides", nargs=-1, metavar="[A.B=C]...")
@click.option(
    "--max-drop", default="1%", show_default=True, help="Of the metric: 1% of its value, or 0.01 in its unit."
)
@click.option("--data", default="", metavar="TASK", help="The Task that measures and trains; default: the model's own.")
@click.option(
    "--student",
    "students",
    multiple=True,
    metavar="SPEC",
    help="What learns from the model: hidden=64 (its arguments), file.py:Student, or none. Default: half the width.",
)
@click.option("--try", "steps", default=None, metavar="STEPS", help=f"Of {','.join(STEPS)}, or none; default: all.")
@click.option("--metric", default="", help="That may drop; default: that of stop, or the first but the loss.")
@click.option(
    "--by", "cost", type=click.Choice(COSTS), default="latency", show_default=True, help="What is to be small."
)
@click.option("--batch", default=32, show_default=True, type=int, help="Samples of the second latency.")
@click.option("--temperature", default=2.0, show_default=True, type=float, help="Of the distillation.")
@click.option(
    "--weight", default=0.7, show_default=True, type=float, help="Of the model's answers in a student's loss."
)
@click.option("--name", default="", help="The registered model's name; default: that of MODEL.")
@click.option("--alias", default="small", show_default=True, help="An alias for the registered version.")
@click.option("--out", default=None, type=click.Path(path_type=Path), help="Folder of the files that are written.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def optimise(
    model: str,
    overrides: tuple[str, ...],
    max_drop: str,
    students: tuple[str, ...],
    steps: str | None,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
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
    request = OptimiseRequest(
        model=model,
        overrides=overrides,
        students=_parse_students(students),
        steps=_parse_steps(steps),
        max_drop=MaxDrop.parse(max_drop),
        **options,
    )
    with needs_extra("report"):
        import matplotlib  # noqa: F401 - a picture is drawn at the end
    folder = prepare_output_folder(out, "optimised")
    try:
        with redirect_stdout(sys.stderr):  # a Task's own output is not part of the result
            found = search(request, lambda line: click.echo(line, err=True))
    except KeyboardInterrupt:
        click.echo("Interrupted; nothing is registered.", err=True)
        sys.exit(128 + signal.SIGINT)
    values = to_json_value(_as_dict(found))
    if as_json:
        click.echo(json.dumps(values))
    else:
        _show(found, request)
    files = {"png": plot_front(found, request), "json": json.dumps(values, indent=2).encode()}
    paths = write_files(folder, f"optimise-{found.teacher.name}-{found.teacher.version}", files)
    if not as_json:
        for path in paths:
            click.echo(f"  {path}")


def _parse_students(given: tuple[str, ...]) -> tuple[str, ...] | None:
    if NONE in given and len(given) > 1:
        raise ConfigError("--student", NONE, "is given with others", "leave it out, or the others")
    return () if given == (NONE,) else given or None


def _parse_steps(text: str | None) -> Any:
    if text is None or text == NONE:
        return None if text is None else ()
    names = [each.strip() for each in text.split(",")]
    for each in names:
        if each not in STEPS:
            raise ConfigError("--try", each, "is no step", f"give some of {', '.join(STEPS)}, or {NONE}")
    return tuple(names)


def _show(found: Outcome, request: OptimiseRequest) -> None:
    numbers = (found.metric, "drop", "1 sample", f"{request.batch} samples", "size", "FLOPs")
    columns = (Column("model", min_width=16, overflow="fold"), *map(make_number_column, numbers), Column(no_wrap=True))
    front = find_front(found.measured, found.metric, found.is_higher_better, request.cost)
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(
        make_table(*columns, rows=(_make_cells(found, each, each in front) for each in range(len(found.models))))
    )
    for title, problem in found.rejected:
        console.print(Text(f"not tried: {title}: {problem}", style="yellow"), soft_wrap=True)
    if found.registered is None:
        click.echo(f"Nothing within {found.metric} {format_number(found.limit)} is better: {found.teacher.ref} stays.")
        return
    chosen = found.registered
    click.echo(f"{chosen.name}@{request.alias} is {chosen.ref} now: {found.models[found.chosen].title}.")
    click.echo(f"Serve it: shoal serve deploy {chosen.ref}")


def _make_cells(found: Outcome, index: int, is_on_front: bool) -> list[str]:
    measured, teacher = found.measured[index], found.measured[0]
    value, before = measured.metrics[found.metric], teacher.metrics[found.metric]
    drop = (before - value) * (1 if found.is_higher_better else -1)
    note = "front" if is_on_front else ""
    if index == found.chosen:
        note = "chosen" if index else "stays"
    elif not is_within(value, found.limit, found.is_higher_better):
        note = "drops too much"
    return [
        found.models[index].title,
        format_number(value),
        format_number(drop) if index else "",
        f"{1e3 * measured.latency_s:.3g} ms",
        f"{1e3 * measured.batch_latency_s:.3g} ms",
        format_size(measured.size_bytes),
        "" if measured.flops is None else format_quantity(measured.flops, "operations"),
        note,
    ]


def _as_dict(found: Outcome) -> dict[str, Any]:
    rows = [
        {"steps": list(model.steps), "run": model.run_id, **asdict(measured), "chosen": index == found.chosen}
        for index, (model, measured) in enumerate(zip(found.models, found.measured, strict=True))
    ]
    return {
        "model": found.teacher.ref,
        "metric": found.metric,
        "limit": found.limit,
        "models": rows,
        "rejected": [{"steps": title, "problem": problem} for title, problem in found.rejected],
        "registered": found.registered.ref if found.registered else None,
    }
