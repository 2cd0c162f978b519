"""Finish a run: register the network, and record the run's cost.

Called by the launchers, in the process that writes the record, after the Trainer has returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import shoal.runs
from shoal.atomic_file import make_folder
from shoal.checkpoint.stored import open_run_store
from shoal.registry import ModelVersion
from shoal.registry.champion import CHAMPION
from shoal.runs import RunRecorder
from shoal.runs.formatting import format_number
from shoal.runs.run_status import Status
from shoal.train.export.model_entry import register_model
from shoal.train.launch.validate import ValidatedRun
from shoal.train.reporting.result import TrainResult
from shoal.train.reporting.time_to_accuracy import find_attempts, find_target_reached, get_evaluations
from shoal.train.spec import TrainSpec
from shoal.weights.tensor_files import list_files


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
    spec: TrainSpec,
    outcome: TrainResult,
    checked: ValidatedRun,
    recorder: RunRecorder,
    *,
    registers: bool,
    should_stop: Callable[[], bool],
) -> ModelVersion | None:
    """Record how the run ended; register its network, unless it was interrupted, and return the version. Raises
    RegistryError.

    should_stop: polled while the champion is measured
    """
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
        from shoal.train.launch.champion_score import score_champion  # loads parts of torch

        about = (checked.factory, checked.signature, checked.fingerprint, recorder)
        scores = score_champion(spec, outcome.metrics, checked, should_stop)
        version = register_model(spec, outcome, *about, scores=scores)
    if missed:
        recorder.finish(Status.NOT_REACHED, missed)
    return version
