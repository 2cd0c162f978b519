"""What a run is predicted to cost, for its record. Called by the shells, in a process that is in no group, and
imported when it is: it loads what every plan needs of torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shoal.cost import CostTable
from shoal.cost.prediction import predict
from shoal.errors import ShoalError
from shoal.train.optimizers import make_optimizer
from shoal.train.spec import TrainSpec
from shoal.train.task import Task, make_task


def predicted_table(task: Task, spec: TrainSpec) -> CostTable:
    """What a step will cost. Raises PlanError, DataError or ConfigError for what could not be run."""
    found = predict(task, spec, make_optimizer)
    if spec.selective_backprop is None:
        return found
    return replace(found, notes=(*found.notes, "without selective_backprop, whose steps are not all alike"))


def predicted_cost(spec: TrainSpec) -> dict[str, Any]:
    """The details of the event PREDICTED. A model that cannot be looked at dry is trained all the same, and this says
    why nothing is predicted of it."""
    try:
        return predicted_table(make_task(spec.task, spec.args), spec).details()
    except (ShoalError, RuntimeError, NotImplementedError) as error:
        return {"notes": [f"not predicted: {type(error).__name__}: {str(error).splitlines()[0][:200]}"]}
