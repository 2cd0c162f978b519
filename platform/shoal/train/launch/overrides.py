"""From overrides to a TrainSpec: `task=lenet stop.epochs=3` starts from the recipe's own spec.

Called by every program that takes `a.b=c` words for a training run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import shoal.runs
from shoal.config import last_override
from shoal.config.field_help import FieldHelp, list_argument_help
from shoal.errors import ConfigError
from shoal.train.spec import TrainSpec
from shoal.train.task import find_source_file, find_task, load_task_file, require_source_file, unload_if_changed


def spec_from_overrides(overrides: list[str]) -> TrainSpec:
    """The spec of `resume=RUN`, or the recipe's of `task=NAME`, or the defaults; with the overrides. Raises
    ConfigError.

    `choose_spec` of a recipe, as that of finetune, chooses its Task by the overrides.
    """
    task = last_override(overrides, "task")
    if choose := _find_in_recipe(task, "choose_spec"):
        chosen: TrainSpec = choose([each for each in overrides if not each.startswith("task=")])
        return chosen
    if resumed := last_override(overrides, "resume"):
        return TrainSpec.from_record(shoal.runs.load(resumed).spec, overrides)
    return load_recipe(task).override(overrides)


def list_task_arguments(spec: TrainSpec) -> Iterator[FieldHelp]:
    """Those of its Task, for help."""
    if spec.task:
        yield from list_argument_help(find_task(spec.task), spec.args)


def load_recipe(task: str) -> TrainSpec:
    """The result of `spec()` in the file of a task; the defaults if it has none."""
    if (make_spec := _find_in_recipe(task, "spec")) is None:
        return TrainSpec(task=task)
    spec = make_spec()
    if not isinstance(spec, TrainSpec):
        raise ConfigError("task", task, f"its file's spec() gave a {type(spec).__name__}", "return a TrainSpec")
    return spec.model_copy(update={"task": task})


def _find_in_recipe(task: str, name: str) -> Callable[..., Any] | None:
    """A function of the file of a task."""
    unload_if_changed(task)
    path = find_source_file(task)
    if path is None:
        return None
    require_source_file(task)  # before a field that its recipe may need
    found: Callable[..., Any] | None = getattr(load_task_file(path, task), name, None)
    return found
