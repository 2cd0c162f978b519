"""From overrides to a TrainSpec: `task=lenet stop.epochs=3` starts from the recipe's own spec.

Called by every program that takes `a.b=c` words for a training run.
"""

from __future__ import annotations

from collections.abc import Iterator

import shoal.runs
from shoal.config import last_override
from shoal.config.field_help import FieldHelp, list_argument_help
from shoal.errors import ConfigError
from shoal.train.spec import TrainSpec
from shoal.train.task import find_source_file, find_task, load_task_file, require_source_file, unload_if_changed


def spec_from_overrides(overrides: list[str]) -> TrainSpec:
    """The spec of `resume=RUN`, or the recipe's of `task=NAME`, or the defaults; with the overrides. Raises
    ConfigError."""
    resumed, task = last_override(overrides, "resume"), last_override(overrides, "task")
    if resumed:
        return TrainSpec.from_record(shoal.runs.load(resumed).spec, overrides)
    return (load_recipe(task) if task else TrainSpec()).override(overrides)


def list_task_arguments(spec: TrainSpec) -> Iterator[FieldHelp]:
    """Those of its Task, for help."""
    if spec.task:
        yield from list_argument_help(find_task(spec.task), spec.args)


def load_recipe(task: str) -> TrainSpec:
    """The result of `spec()` in the file of a task; the defaults if it has none."""
    unload_if_changed(task)
    path = find_source_file(task)
    if path is None:
        return TrainSpec(task=task)
    require_source_file(task)  # before a field that its recipe may need
    make_spec = getattr(load_task_file(path, task), "spec", None)
    if make_spec is None:
        return TrainSpec(task=task)
    spec = make_spec()
    if not isinstance(spec, TrainSpec):
        raise ConfigError("task", task, f"{path.name}'s spec() gave a {type(spec).__name__}", "return a TrainSpec")
    return spec.model_copy(update={"task": task})
