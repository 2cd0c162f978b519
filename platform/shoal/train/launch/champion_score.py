"""Measures the present champion on the validation data of a run, where it was measured on other data.

Called before the network of a run is registered, in the process that writes the record. So the two are comparable: by
the Task, the rows, the loss and the metrics of this run, each network with the encoders that were fitted for it.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from shoal.data.fingerprint import fingerprint
from shoal.data.loader import make_loader
from shoal.errors import ConfigError, summarize_error
from shoal.parallel import ParallelSpec, World
from shoal.parallel.spmd.base import SingleProcessModel
from shoal.registry import ModelFactory, ModelVersion, Registry
from shoal.registry.champion import CHAMPION, is_same_data
from shoal.registry.verification import MAX_BYTES
from shoal.train.export.model_entry import make_model_name
from shoal.train.launch.validate import ValidatedRun
from shoal.train.loop.evaluation import evaluate
from shoal.train.reporting.result import TrainResult
from shoal.train.run_setup import make_facts
from shoal.train.spec import TrainSpec
from shoal.train.stateful_metric import MetricSet
from shoal.train.task import Task, load_data, make_task
from shoal.weights.tensor_files import read_tensors

logger = logging.getLogger(__name__)
MIN_SCORE_S = 60.0  # for the former champion, where the training was shorter


def score_champion(spec: TrainSpec, outcome: TrainResult, checked: ValidatedRun) -> dict[int, float]:
    """The metric by which versions compare, of the present champion on this run's validation data, by its version; {}
    where there is nothing to measure, or it cannot be measured."""
    registry, ref = Registry(), f"{make_model_name(spec)}@{CHAMPION}"
    criterion = spec.choose_criterion(outcome.metrics)
    if spec.aliases is not None or criterion.metric not in outcome.metrics or not registry.has(ref):
        return {}
    champion = registry.get(ref)
    about = champion.manifest
    is_measured = criterion.metric in about.metrics and is_same_data(checked.fingerprint, about.data)
    if is_measured or about.model.format != "module" or about.size_bytes > MAX_BYTES:
        return {}
    try:
        metrics = _evaluate(champion, spec, checked, max(MIN_SCORE_S, outcome.seconds))
        return {champion.version: metrics[criterion.metric]}
    except Exception as error:  # noqa: BLE001 - networks and data of the user's that need not fit each other
        logger.warning("%s is not measured on this data: %s", champion.ref, summarize_error(error))
        return {}


def _identify_code(factory: ModelFactory) -> tuple[object, ...]:
    kwargs, code = factory.kwargs, factory.code
    return kwargs.get("name", kwargs.get("task")), kwargs.get("source"), code.sha256 if code else ""


def _evaluate(version: ModelVersion, spec: TrainSpec, checked: ValidatedRun, limit_s: float) -> dict[str, float]:
    """The metrics of a registered network of the same Task on the validation data of a run, by its own encoders."""
    task, deadline_s, factory = make_task(spec.task, spec.args), time.monotonic() + limit_s, version.manifest.model
    if _identify_code(factory) != _identify_code(checked.factory):
        raise ConfigError("task", version.ref, "is of another Task, or of an earlier text of it")
    if type(task).fit_args is not Task.fit_args:
        load_data(task, spec.task)
        if not (adopted := task.adopt_fitted(factory.kwargs["args"])):
            raise ConfigError("task", version.ref, "has encoders of its own")
        task = make_task(spec.task, {**spec.args, **adopted})
    data = load_data(task, spec.task)
    task.setup(make_facts(spec, checked.steps_per_epoch))
    rows = data.validation
    assert rows is not None
    if f"{type(rows).__name__} {fingerprint(rows)}" != checked.fingerprint["validation"]:
        raise ConfigError("data.validation", version.ref, "has other rows with its encoders")
    network: Any = factory.build()
    network.load_state_dict(read_tensors(version.snapshot()))

    def stop_late(*_: object) -> None:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"it takes longer than {limit_s:.0f} s")

    world = World.single()
    stateful = MetricSet(task.stateful_metrics(), task.update_metric, world, True, task.finish_evaluation)
    stateful.watch.append(stop_late)
    model = SingleProcessModel(network.to(world.device), task, ParallelSpec(), world, 0)
    with make_loader(data, "validation", batch_size=spec.batch_size) as loader:
        return evaluate(model, loader, stateful)
