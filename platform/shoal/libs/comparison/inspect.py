"""`shoal inspect`: what a Task will cost under a plan, before it runs; after a run, predicted vs. measured cost.

Parse, call, print. No Ray, no worker: fake process groups simulate a plan of many ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from rich.table import Column
from rich.text import Text

from shoal.config import format_override
from shoal.errors import RunError
from shoal.extend.cli import PRINTED, Overrides, Printed, TaskName, make_table, render_table, verb
from shoal.runs import Run, load

if TYPE_CHECKING:
    from shoal.extend.cost import CostTable

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before importing torch: else its profiler prints remarks


@verb(**PRINTED, work="predicting the cost")
def inspect(what: Annotated[TaskName, "TASK|RUN"], overrides: Overrides = ()) -> Printed:
    """Predict what a TASK costs: parameters, FLOPs, memory, bytes sent, time; and show what each rank stores.

    With the id of a RUN (or `latest`): the predicted and the measured cost.

    \b
    Examples:
      shoal inspect lenet
      shoal inspect lenet parallel=ddp workers=2 batch_size=256
      shoal inspect my_task.py:MyTask parallel=fsdp workers=4 --json
      shoal inspect latest
    """
    run = None if overrides else _find_run(what)
    return _describe_task(what, overrides) if run is None else _describe_run(run)


def _find_run(what: str) -> Run | None:
    """The run, unless the word names a task."""
    from shoal.extend.train import find_source_file

    if ":" in what or find_source_file(what) is not None:
        return None
    try:
        return load(what)
    except RunError:
        return None


def _describe_task(reference: str, overrides: tuple[str, ...]) -> Printed:
    from shoal.extend.cost import PLACEMENT_HEADINGS, build_cost_panel
    from shoal.extend.train import make_task, predict_table, spec_from_overrides

    with redirect_stdout(sys.stderr):  # a Task's own output is not part of the result
        spec = spec_from_overrides([format_override("task", reference), *overrides])
        task = make_task(reference, spec.args)
        table = predict_table(task, spec)
    plan = {
        "task": reference,
        "plan": spec.resolve_dims().description,
        "workers": spec.workers,
        "batch_size": spec.batch_size,
    }
    placed = [asdict(line) for line in table.placement_rows]
    title = f"{reference}, {plan['plan']}, {spec.workers} worker(s), batch of {spec.batch_size}"
    costs = render_table(build_cost_panel({"predicted": table.values}))
    lines: list[object] = [Text(title, style="bold"), costs, _list_notes(table)]
    if table.placement_rows:
        columns = (
            Column(each, justify="right" if each == "parameters" else "left", overflow="fold")
            for each in PLACEMENT_HEADINGS
        )
        lines.append(make_table(*columns, rows=(line.to_cells() for line in table.placement_rows)))
    return Printed(lines, {**plan, **table.to_details(), "placement": placed})


def _describe_run(run: Run) -> Printed:
    from shoal.extend.cost import MEASURED, PREDICTED, CostTable, build_cost_panel

    events = run.last_events()
    if PREDICTED not in events and MEASURED not in events:
        raise RunError(f"run {run.id!r} has no record of what it costs: it is no training run, or ended too early")
    predicted, measured = (CostTable.from_details(events.get(kind, {})) for kind in (PREDICTED, MEASURED))
    costs = render_table(build_cost_panel({"predicted": predicted.values, "measured": measured.values}))
    lines: list[object] = [Text(f"{run.id}: predicted beside measured", style="bold"), costs]
    if PREDICTED not in events:
        hint = "A run is predicted when it ends by itself; before that: shoal inspect TASK a.b=c"
        lines.append(Text(hint, style="dim"))
    values = {"run": run.id, "predicted": predicted.to_details(), "measured": measured.to_details()}
    return Printed([*lines, _list_notes(predicted)], values)


def _list_notes(table: CostTable) -> Iterator[Text]:
    if table.unknown:
        yield Text(f"unknown, and not in the FLOPs: {', '.join(table.unknown)}", style="yellow")
    if table.cuts:
        yield Text(f"stages after the first begin at: {', '.join(table.cuts)}", style="dim")
    yield from (Text(note, style="dim") for note in table.notes)
