"""Measures the present champion on the validation data of a run, where it was measured on other data.

Called before the network of a run is registered, in the process that writes the record. So the two are comparable: by
the Task, the rows, the loss and the metrics of this run, each network with the encoders that were fitted for it. Any
other argument may change how inputs are prepared, so only those that say where the data lie may differ.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.data.fingerprint import fingerprint
from shoal.data.loader import make_loader
from shoal.errors import ConfigError, ShoalError, summarize_error
from shoal.parallel import ParallelSpec, World
from shoal.parallel.spmd.base import SingleProcessModel
from shoal.registry import ModelVersion, Registry
from shoal.registry.champion import CHAMPION, is_same_data
from shoal.registry.verification import MAX_BYTES
from shoal.store import is_url
from shoal.train.export.model_entry import make_model_name
from shoal.train.launch.validate import ValidatedRun
from shoal.train.loop.evaluation import evaluate
from shoal.train.run_facts import make_facts
from shoal.train.spec import TrainSpec
from shoal.train.stateful_metric import MetricSet
from shoal.train.task import Task, load_data, make_task
from shoal.weights.tensor_files import read_tensors

LIMIT_S = 60.0  # of reading and measuring; checked after each batch

logger = logging.getLogger(__name__)


def score_champion(
    spec: TrainSpec, metrics: Mapping[str, float], checked: ValidatedRun, should_stop: Callable[[], bool]
) -> dict[int, float]:
    """The metric by which versions compare, of the present champion on this run's validation data, by its version; {}
    where there is nothing to measure, or it cannot be measured, in LIMIT_S, or before `should_stop` says so."""
    registry, ref = Registry(), f"{make_model_name(spec)}@{CHAMPION}"
    metric = spec.choose_criterion(metrics).metric
    if spec.aliases is not None or metric not in metrics or not registry.has(ref):
        return {}
    champion = registry.get(ref)
    about = champion.manifest
    if (metric in about.metrics and is_same_data(checked.fingerprint, about.data)) or about.size_bytes > MAX_BYTES:
        return {}
    try:
        return {champion.version: _evaluate(champion, spec, checked, should_stop)[metric]}
    except Exception as error:  # noqa: BLE001 - networks and data of the user's that need not fit each other
        logger.warning("%s is not measured on this data: %s", ref, summarize_error(error))
        return {}


def _evaluate(
    version: ModelVersion, spec: TrainSpec, checked: ValidatedRun, should_stop: Callable[[], bool]
) -> dict[str, float]:
    until_s = time.monotonic() + LIMIT_S

    def check(outputs: Any, batch: Any) -> None:
        if should_stop() or time.monotonic() > until_s:
            raise ShoalError(f"it was stopped, or has taken {LIMIT_S:g} s")

    task, factory = make_task(spec.task, spec.args), version.manifest.model
    same = [(each.code, {**each.kwargs, "args": None}) for each in (factory, checked.factory)]
    if same[0] != same[1] or (type(task).fit_args is Task.fit_args) != (type(task).adopt_fitted is Task.adopt_fitted):
        raise ConfigError("task", version.ref, "is of another Task or text, or has encoders of its own")
    theirs, fitted = factory.kwargs["args"], task.adopt_fitted(factory.kwargs["args"])
    ours = json.loads(json.dumps(checked.factory.kwargs["args"]))  # as in a manifest: lists for tuples
    for name in sorted({*theirs, *ours} - {*fitted}):
        values = [each.get(name, ...) for each in (theirs, ours)]
        if values[0] != values[1] and not all(map(_is_location, values)):
            raise ConfigError(f"args.{name}", values[1], f"may measure {version.ref} otherwise, whose is {values[0]!r}")
    task = make_task(spec.task, {**spec.args, **fitted})
    data = load_data(task, spec.task)
    task.setup(make_facts(spec, checked.steps_per_epoch, 0, 1))
    rows: Any = data.validation
    if f"{type(rows).__name__} {fingerprint(rows)}" != checked.fingerprint["validation"]:
        raise ConfigError("data.validation", version.ref, "has other rows with its encoders")
    network: Any = factory.build()
    network.load_state_dict(read_tensors(version.snapshot()))
    world = World.single()
    stateful = MetricSet(task.stateful_metrics(), task.update_metric, world, True, task.finish_evaluation)
    stateful.watch.append(check)
    with make_loader(data, "validation", batch_size=spec.batch_size) as loader:
        model = SingleProcessModel(network.to(world.device), task, ParallelSpec(), world, 0)
        return evaluate(model, loader, stateful)


def _is_location(value: object) -> bool:
    """Whether an argument is a URL, or the path of a file or folder that is there."""
    return isinstance(value, str) and value != "" and (is_url(value) or Path(value).expanduser().exists())
