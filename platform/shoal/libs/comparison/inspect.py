"""`shoal inspect`: what a Task will cost under a plan, before it runs; after a run, predicted vs. measured cost.

Parse, call, print. No Ray, no worker: fake process groups simulate a plan of many ranks.
"""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Column
from rich.text import Text

from shoal.config import format_override
from shoal.errors import RunError
from shoal.extend.cli import json_option, make_table, overrides_argument, print_json, render_table, strip_task_key
from shoal.runs import Run, load

if TYPE_CHECKING:
    from shoal.extend.cost import CostTable

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before importing torch: else its profiler prints remarks


@click.command()
@click.argument("what", metavar="TASK|RUN", callback=strip_task_key)
@overrides_argument
@json_option
def inspect(what: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Predict what a TASK costs: parameters, FLOPs, memory, bytes sent, time; and show what each rank stores.

    With the id of a RUN (or `latest`): the predicted and the measured cost.

    \b
    Examples:
      shoal inspect lenet
      shoal inspect lenet parallel=ddp workers=2 batch_size=256
      shoal inspect my_task.py:MyTask parallel=fsdp workers=4 --json
      shoal inspect latest
    """
    console = Console(highlight=False)
    run = None if overrides else _find_run(what)
    if run is not None:
        _show_run(console, run, as_json)
    else:
        _show_task(console, what, overrides, as_json)


def _find_run(what: str) -> Run | None:
    """The run, unless the word names a task."""
    from shoal.extend.train import find_source_file

    if ":" in what or find_source_file(what) is not None:
        return None
    try:
        return load(what)
    except RunError:
        return None


def _show_task(console: Console, reference: str, overrides: tuple[str, ...], as_json: bool) -> None:
    from shoal.extend.cost import PLACEMENT_HEADINGS, build_cost_panel
    from shoal.extend.train import make_task, predict_table, spec_from_overrides

    with redirect_stdout(sys.stderr):  # a Task's own output is not part of the result
        spec = spec_from_overrides([format_override("task", reference), *overrides])
        task = make_task(reference, spec.args)
        table = predict_table(task, spec)
    if as_json:
        plan = {
            "task": reference,
            "plan": spec.resolve_dims().description,
            "workers": spec.workers,
            "batch_size": spec.batch_size,
        }
        placed = [asdict(line) for line in table.placement_rows]
        print_json({**plan, **table.to_details(), "placement": placed})
        return
    title = f"{reference}, {spec.resolve_dims().description}, {spec.workers} worker(s), batch of {spec.batch_size}"
    console.print(Text(title, style="bold"))
    console.print(render_table(build_cost_panel({"predicted": table.values})))
    _print_notes(console, table)
    if table.placement_rows:
        columns = (
            Column(each, justify="right" if each == "parameters" else "left", overflow="fold")
            for each in PLACEMENT_HEADINGS
        )
        console.print(make_table(*columns, rows=(line.to_cells() for line in table.placement_rows)))


def _show_run(console: Console, run: Run, as_json: bool) -> None:
    from shoal.extend.cost import MEASURED, PREDICTED, CostTable, build_cost_panel

    events = run.last_events()
    if PREDICTED not in events and MEASURED not in events:
        raise RunError(f"run {run.id!r} has no record of what it costs: it is no training run, or ended too early")
    predicted, measured = (CostTable.from_details(events.get(kind, {})) for kind in (PREDICTED, MEASURED))
    if as_json:
        both = {"predicted": predicted.to_details(), "measured": measured.to_details()}
        print_json({"run": run.id, **both})
        return
    console.print(Text(f"{run.id}: predicted beside measured", style="bold"))
    console.print(render_table(build_cost_panel({"predicted": predicted.values, "measured": measured.values})))
    if PREDICTED not in events:
        console.print("A run is predicted when it ends by itself; before that: shoal inspect TASK a.b=c", style="dim")
    _print_notes(console, predicted)


def _print_notes(console: Console, table: CostTable) -> None:
    if table.unknown:
        console.print(Text(f"unknown, and not in the FLOPs: {', '.join(table.unknown)}", style="yellow"))
    if table.cuts:
        console.print(Text(f"stages after the first begin at: {', '.join(table.cuts)}", style="dim"))
    for note in table.notes:
        console.print(Text(note, style="dim"))
