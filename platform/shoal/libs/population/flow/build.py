"""The members of a population run, built from its spec.

Called by `run` for members of this process, and by `ray_members` in workers that hold a share each.
Legend: K members, k of a share.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from shoal import checkpoint
from shoal.errors import CheckpointError, ConfigError
from shoal.extend.runs import load
from shoal.extend.train import Task, build_model, load_initial_weights, make_task
from shoal.libs.population import Population
from shoal.libs.population.augmentation import augment_batch
from shoal.libs.population.row_optimizer import RowOptimizer
from shoal.libs.population.spec import PopulationSpec

Values = Sequence[Mapping[str, Any]]  # of the space, for each member


def divide_members(spec: PopulationSpec) -> list[range]:
    """The members of each worker."""
    bounds = [spec.members * index // spec.workers for index in range(spec.workers + 1)]
    return list(itertools.starmap(range, itertools.pairwise(bounds)))


def load_member(run: str, member: int) -> dict[str, Tensor]:
    """A member of a population run, as an ordinary state dict on the CPU, from the run's newest checkpoint.

    run: an id, the unique beginning of one, or `latest`
    Raises RunError for an unknown run, CheckpointError without a checkpoint, ConfigError for an unknown member.
    """
    record = load(run)
    spec = PopulationSpec.from_record(record.spec)
    loaded = checkpoint.load_latest(record.folder / "checkpoints")
    if loaded is None:
        raise CheckpointError(f"run {record.id} has no checkpoint: the first one is saved after its first round")
    share = next((each for each in divide_members(spec) if member in each), None)
    if share is None:
        raise ConfigError("member", member, f"the run has members 0 to {spec.members - 1}")
    state = loaded.state["population"]
    values = [loaded.state["values"][each] for each in share]
    task = make_task(spec.task, spec.args)
    with build_population(spec, task, torch.device("cpu"), values, share.start, threads=1) as population:
        population.load_state_dict(state["shares"][divide_members(spec).index(share)] if "shares" in state else state)
        return population.member_state_dict(member - share.start)


def build_network(spec: PopulationSpec, task: Task) -> nn.Module:
    """A member's network, as it begins."""
    network = build_model(task, spec.task)
    load_initial_weights(network, spec.init or task.initial_weights())
    return network


def build_population(
    spec: PopulationSpec, task: Task, device: torch.device, values: Values, first: int = 0, threads: int | None = None
) -> Population:
    """The members `first`, `first` + 1, ... with these values of the space."""
    own = {path: [float(each[path]) for each in values] for path in values[0]}
    augmentations, names = task.augmentations(), spec.augmentations

    def augment(batch: Any, strengths: Mapping[str, Tensor], generators: Sequence[Generator]) -> Any:
        return augment_batch(batch, augmentations, {name: strengths[name] for name in names}, generators)

    return Population(
        partial(build_network, spec, task),
        task.loss,
        members=len(values),
        optimizer=RowOptimizer(spec.optimizer.name, betas=spec.optimizer.betas),
        hyper_parameters={**spec.hyper_parameters, **own},
        inputs=task.inputs,
        metrics=task.metrics,
        augment=augment if names else None,
        order=spec.order,
        seed=spec.seed + first,
        engine=spec.engine,
        chunk=spec.chunk,
        threads=spec.threads or threads,
        device=device,
        memory_bytes=spec.memory_bytes,
    )
