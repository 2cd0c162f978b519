"""Finish a run: register the network, and record the run's cost.

Called by the launchers, in the process that writes the record, after the Trainer has returned.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import shoal.runs
from shoal.atomic_file import make_folder
from shoal.checkpoint.stored import open_run_store
from shoal.data.fingerprint import fingerprint
from shoal.data.loader import make_loader
from shoal.errors import ConfigError, summarize_error
from shoal.parallel import ParallelSpec, World
from shoal.parallel.spmd.base import SingleProcessModel
from shoal.registry import ModelFactory, ModelVersion, Registry
from shoal.registry.champion import CHAMPION, is_same_data
from shoal.registry.verification import MAX_BYTES
from shoal.runs import RunRecorder
from shoal.runs.formatting import format_number
from shoal.runs.run_status import Status
from shoal.train.export.model_entry import make_model_name, register_model
from shoal.train.launch.validate import ValidatedRun
from shoal.train.loop.evaluation import evaluate
from shoal.train.reporting.result import TrainResult
from shoal.train.reporting.time_to_accuracy import find_attempts, find_target_reached, get_evaluations
from shoal.train.run_setup import make_facts
from shoal.train.spec import TrainSpec
from shoal.train.stateful_metric import MetricSet
from shoal.train.task import Task, load_data, make_task
from shoal.weights.tensor_files import list_files, read_tensors

logger = logging.getLogger(__name__)
MIN_SCORE_S = 60.0  # for the former champion, where the training was shorter


def fetch_weights(outcome: TrainResult, run_id: str) -> None:
    """Download the network that the first rank has written on another host. Raises StoreError, CheckpointError,
    WeightsError."""
    path = outcome.weights
    if path is None or path.exists() or (store := open_run_store(run_id)) is None:
        return
    make_folder(path.parent)
    draft = path.with_name(f".{path.name}")
    store.download(path.name, draft)
    for file in list_files(draft):
        if file != draft:  # it is an index, which comes last
            store.download(file.name, file)
    draft.replace(path)


def describe_missed_target(spec: TrainSpec, outcome: TrainResult) -> str:
    """What a run that ended by another criterion lacks of its target; "" where there was none, or it was reached."""
    target = spec.stop.target
    if target is None or outcome.reason == "target" or outcome.is_interrupted:
        return ""
    best = outcome.metrics.get(target.metric, math.nan)
    reached = f"the best is {format_number(best)}, of step {outcome.selected_step:,}"
    return f"the target {target} was not reached, {reached}: {outcome.detail}"


def finalize_run(
    spec: TrainSpec, outcome: TrainResult, checked: ValidatedRun, recorder: RunRecorder, *, registers: bool
) -> ModelVersion | None:
    """Record how the run ended; register its network, unless it was interrupted, and return the version. Raises
    RegistryError."""
    if outcome.is_interrupted:
        recorder.finish(Status.STOPPED, "interrupted")
        return None
    recorder.record_event(
        "trained",
        reason=outcome.reason,
        detail=outcome.detail,
        steps=outcome.steps,
        kept=outcome.selected_step,
        seconds=outcome.seconds,
        metrics=outcome.metrics,
        weights=outcome.weights.name if outcome.weights else None,
    )
    recorder.flush()
    fetch_weights(outcome, recorder.id)
    target = spec.stop.target
    if target is not None:
        run = shoal.runs.load(recorder.id)
        rows = get_evaluations(run.metrics(), f"validation/{target.metric}")
        attempts = find_attempts(run.events(), spec.workers)
        reached = find_target_reached(rows, target, attempts, spec.price_per_device_hour)
        if reached is not None:
            facts = {"step": reached.step, "training_s": reached.training_s, "money": reached.money}
            recorder.record_event("target_reached", **facts)
    missed, version = describe_missed_target(spec, outcome), None
    if registers:
        if missed:  # what follows champion keeps what it has
            spec = spec.model_copy(update={"aliases": [alias for alias in spec.aliases or () if alias != CHAMPION]})
        about = (checked.factory, checked.signature, checked.fingerprint, recorder)
        version = register_model(spec, outcome, *about, scores=_score_champion(spec, outcome, checked))
    if missed:
        recorder.finish(Status.NOT_REACHED, missed)
    return version


def _score_champion(spec: TrainSpec, outcome: TrainResult, checked: ValidatedRun) -> dict[int, float]:
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
