"""The predicted cost of a run, for its record, by the estimator of a library: without one nothing is predicted.

Called by the launchers and by `shoal inspect`, in a process without a process group. An estimator is imported on use:
it loads torch's modules for every plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal.cost import CostTable
from shoal.errors import ConfigError, ShoalError, summarize_error
from shoal.plugins.find import load_reference
from shoal.plugins.library import collect_extensions
from shoal.train.spec import TrainSpec
from shoal.train.task import Task, make_task

GROUP = "shoal.estimators"

# Predicts a step of the Task under the spec, and leaves the process as it was. Raises PlanError, DataError or
# ConfigError for a run that is impossible.
Estimator = Callable[[Task, TrainSpec], CostTable]


def find_estimator() -> Estimator | None:
    """That of an installed package, or ours; None without a library that has one."""
    references = list(collect_extensions(GROUP).values())
    estimator: Estimator | None = load_reference(references[-1]) if references else None
    return estimator


def predict_table(task: Task, spec: TrainSpec) -> CostTable:
    """Predict the cost of a step. Raises PlanError, DataError or ConfigError if that is impossible."""
    if (estimate := find_estimator()) is None:
        raise ConfigError("task", spec.task, "is predicted by a library, and none is installed", "install one")
    try:
        return _predict(estimate, task, spec)
    except ShoalError:
        raise
    except Exception as error:  # whatever a user's code raises of batches and plans that a run may never give it
        problem = f"cannot be looked at before it runs: {_format_error(error)}"
        remedy = "if the Task is right, train it all the same: a run says what it measures"
        raise ConfigError("task", spec.task, problem, remedy) from error


def predict_cost_details(spec: TrainSpec) -> dict[str, Any]:
    """The details of the event PREDICTED. A model that cannot be predicted is trained all the same, and the details
    give the reason."""
    try:
        if (estimate := find_estimator()) is None:
            return {"notes": ["not predicted: no library that predicts is installed"]}
        return _predict(estimate, make_task(spec.task, spec.args), spec).to_details()
    except Exception as error:  # noqa: BLE001 - a user's code, run as no run does: no reason to start or end none
        return {"notes": [f"not predicted: {_format_error(error)}"]}


def _predict(estimate: Estimator, task: Task, spec: TrainSpec) -> CostTable:
    table = estimate(task, spec)
    if spec.selective_backprop is None:
        return table
    return replace(table, notes=(*table.notes, "without selective_backprop, whose steps are not all alike"))


def _format_error(error: Exception) -> str:
    name, line = type(error).__name__, summarize_error(error)
    return name if line == name else f"{name}: {line}"
