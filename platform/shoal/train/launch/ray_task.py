"""Calls in a worker process of what needs a run's Task: the driver, which may be on a host with few CPUs and little
memory, builds no model and reads no data.

Called by `flows.training` before a run's workers begin and after they have ended. Workers of a run use what prepares a
process for a Task.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from shoal.cluster.admission import PlacementRequest
from shoal.cluster.capacity import NODES_WAIT_S, make_host_options, require_cpus
from shoal.errors import ClusterError, ShoalError, TrainError, summarize_error
from shoal.gc_freeze import freeze_loaded_objects
from shoal.train.launch.validate import ValidatedRun
from shoal.train.spec import TrainSpec
from shoal.train.task import JOBS

T = TypeVar("T")
_PLACE = {"CPU": 1.0}
PREDICTION_TIMEOUT_S = 600.0


def check_on_worker(spec: TrainSpec, say: Callable[[str], None], meanwhile: Callable[[], object]) -> ValidatedRun:
    """The facts about a run whose words are valid. Raises what `validate_task` raises, and ClusterError where no node
    comes on which to check.

    say:       receives the reason for a wait
    meanwhile: called while the worker checks
    """
    if require_cpus(1.0, "workers", [_PLACE]):
        wait_s = NODES_WAIT_S if spec.wait is None else spec.wait
        say("waiting for a node on which to check the run")
        with closing(PlacementRequest([_PLACE])) as request:
            if not request.is_granted(wait_s):
                lack = f"no node came within {wait_s:g} s on which to check the run"
                raise ClusterError(f"{lack}: give it more with wait=1h")
        say("a node has come")
    answer = _start(_check, spec, make_host_options())
    meanwhile()
    checked: ValidatedRun = _get(answer, spec)
    return checked


def _check(spec: TrainSpec) -> ValidatedRun:
    from shoal.train.launch.validate import validate_task

    return validate_task(spec)


def predict_on_worker(spec: TrainSpec) -> dict[str, Any]:
    """The details of the event PREDICTED, on a GPU for a run on GPUs, of which one must become free in time."""
    answer = _start(_predict, spec, {"num_gpus": 1} if spec.device == "cuda" else make_host_options())
    try:
        details: dict[str, Any] = _get(answer, spec, PREDICTION_TIMEOUT_S)
    except ShoalError as error:  # no reason to fail a run that has ended
        ray.cancel(answer, force=True)
        return {"notes": [f"not predicted: {summarize_error(error)}"]}
    return details


def _predict(spec: TrainSpec) -> dict[str, Any]:
    from shoal.train.launch.predicted_cost import predict_cost_details

    return predict_cost_details(spec)


def _start(function: Callable[[TrainSpec], T], spec: TrainSpec, options: Mapping[str, Any]) -> ray.ObjectRef[Any]:
    """Call `function` in a process of its own. The check reserves no CPU: it ends before the run's workers begin, and a
    busy cluster must not hold it up."""
    return ray.remote(max_calls=1, max_retries=0, **options)(_run_here).remote(Path.cwd(), function, spec)


def _get(answer: ray.ObjectRef[Any], spec: TrainSpec, timeout_s: float | None = None) -> Any:
    try:
        answered, error = ray.get(answer, timeout=timeout_s)
    except RayError as failure:
        problem = f"the worker that looked at {spec.task} died, or is late: {summarize_error(failure, line=-1)}"
        raise TrainError(problem) from failure
    if error is not None:
        raise error
    return answered


def _run_here(folder: Path, function: Callable[[TrainSpec], T], spec: TrainSpec) -> tuple[T | None, ShoalError | None]:
    with freeze_loaded_objects():
        import torch._dynamo  # noqa: F401 - as every optimizer does
    change_to_task_folder(spec.task, folder)
    try:
        return function(spec), None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's code may raise anything
        return None, to_shoal_error(error)


def change_to_task_folder(task: str, working_folder: Path) -> None:
    """Change to the folder of relative paths: the driver's own, or the copy that Ray has sent here.

    A Task that no folder has is installed. Its driver's folder is then the place, where this host has it.
    """
    place = task.partition(":")[0]
    names = [Path(place)] if place.endswith(".py") else [JOBS / f"{place}.py"]
    for folder in (working_folder, *map(Path, sys.path)):
        if any((folder / name).is_file() for name in names):
            os.chdir(folder)
            return
    if working_folder.is_dir():
        os.chdir(working_folder)


def to_shoal_error(error: Exception | SystemExit) -> ShoalError:
    """Convert an error for sending: a user's own exception with its traceback."""
    if isinstance(error, ShoalError):
        return error
    return TrainError("".join(traceback.format_exception(error)).rstrip())
