"""The predicted cost of a run, for its record. Called by the launchers, in a process without a process group, and
imported on use: it loads torch's modules for every plan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shoal.cost import CostTable
from shoal.cost.predict.predict import predict_cost
from shoal.errors import ConfigError, ShoalError, summarize_error
from shoal.train.optim.optimizers import make_optimizer
from shoal.train.spec import TrainSpec
from shoal.train.task import Task, make_task


def predict_table(task: Task, spec: TrainSpec) -> CostTable:
    """Predict the cost of a step. Raises PlanError, DataError or ConfigError if that is impossible."""
    try:
        return _predict(task, spec)
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
        return _predict(make_task(spec.task, spec.args), spec).to_details()
    except Exception as error:  # noqa: BLE001 - a user's code, run as no run does: no reason to start or end none
        return {"notes": [f"not predicted: {_format_error(error)}"]}


def _predict(task: Task, spec: TrainSpec) -> CostTable:
    found = predict_cost(task, spec, make_optimizer)
    if spec.selective_backprop is None:
        return found
    return replace(found, notes=(*found.notes, "without selective_backprop, whose steps are not all alike"))


def _format_error(error: Exception) -> str:
    name, line = type(error).__name__, summarize_error(error)
    return name if line == name else f"{name}: {line}"
