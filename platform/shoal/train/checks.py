"""Everything about a run that can be found wrong, or found out, before a worker is started for it.

Called by the shells, in the process that starts a run. Builds the Task, its data and its network once, here, and lets
them go again. Takes no step.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import torch
from torch import nn

from shoal.data import Data, Loader
from shoal.data.example import example_batch
from shoal.data.fingerprint import fingerprint
from shoal.errors import ConfigError
from shoal.parallel.checks import check_plan
from shoal.parallel.world import choose_device
from shoal.registry import Signature
from shoal.train.random_state import random_state, seed_everything, set_random_state
from shoal.train.registered import model_name
from shoal.train.schedules import total_steps_of
from shoal.train.signature import signature_of
from shoal.train.spec import TrainSpec
from shoal.train.task import Task, data_of, make_task, model_of


@dataclass(frozen=True)
class Checked:
    """What is known of a run before it starts.

    signature:   of the network, for the registry
    fingerprint: of the data, by its part
    """

    signature: Signature
    fingerprint: dict[str, str]
    num_parameters: int
    steps_per_epoch: int | None


def check(spec: TrainSpec) -> Checked:
    """Raises ConfigError, PlanError or DataError with field, value and remedy, when the run cannot work."""
    degrees = spec.parallel.degrees(spec.workers)
    samples = spec.parallel.samples(spec.batch_size, degrees)
    if spec.stop.is_empty:
        raise ConfigError("stop", None, "nothing says when to end", "give stop.epochs=3, say, or stop.steps=1000")
    task = make_task(spec.task, spec.args)
    if spec.workers > 1:
        _require_pickles(task, spec)
    data = data_of(task, spec.task)
    before = random_state()
    try:
        return _try_out(spec, task, data, samples)
    finally:
        set_random_state(before)


def _try_out(spec: TrainSpec, task: Task, data: Data, samples: int) -> Checked:
    degrees = spec.parallel.degrees(spec.workers)
    loader = Loader(
        data.train, batch_size=spec.batch_size, share=(0, degrees.data), seed=spec.seed, collate=data.collate
    )
    try:
        batch, steps_per_epoch = example_batch(data.train, data.collate, min(samples, 2)), loader.num_batches
    finally:
        loader.close()
    total_steps_of(spec, steps_per_epoch)
    seed_everything(spec.seed)
    model = model_of(task, spec.task)
    device = choose_device(spec.device, 0).type
    check_plan(model, task, spec.parallel, degrees, batch, device)
    _require_metrics(spec, task, data, model, batch)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    signature = signature_of(task, model, batch)
    parts = {"train": data.train, "validation": data.validation, "test": data.test}
    known = {name: fingerprint(source) for name, source in parts.items() if source is not None}
    model_name(spec)
    return Checked(signature, known, num_parameters, steps_per_epoch)


def _require_metrics(spec: TrainSpec, task: Task, data: Data, model: nn.Module, batch: object) -> None:
    """The metrics that `stop` watches must be among those that are evaluated, and there must be an evaluation."""
    watched = [("stop.target", spec.stop.target), ("stop.convergence", spec.stop.convergence)]
    if not any(each for _, each in watched):
        return
    if data.validation is None:
        field = next(name for name, each in watched if each)
        raise ConfigError(
            field, "", "needs an evaluation, and there is no validation data", "give Data(validation=...)"
        )
    with torch.no_grad():
        names = ["loss", *task.metrics(model.eval()(*task.inputs(batch)), batch)]
    model.train()
    for field, each in watched:
        if each is not None and each.metric not in names:
            raise ConfigError(f"{field}.metric", each.metric, "is not evaluated", f"there is {', '.join(names)}")


def _require_pickles(task: Task, spec: TrainSpec) -> None:
    try:
        pickle.dumps(task)
    except Exception as error:  # whatever a user's object raises is why it cannot travel
        problem = f"cannot be sent to workers: {type(error).__name__}: {error}"
        raise ConfigError(
            "task", spec.task, problem, "open files, locks and generators in data(), not in __init__"
        ) from error
