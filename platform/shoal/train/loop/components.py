"""The components of a training run on this rank: model, optimiser, loaders, average, and their state.

Built once from a spec and a Task, in the same order on every rank. Called by the Trainer and the finders. Takes no
step; decides nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.data import Data, Loader
from shoal.data.dataset import is_stream
from shoal.data.loader import load_first_batch, make_loader
from shoal.errors import ConfigError
from shoal.parallel import ParallelDims, World
from shoal.parallel.build import parallelize
from shoal.parallel.deferred.build import build_deferred
from shoal.parallel.deferred.weights import DeferredWeights
from shoal.parallel.model import ParallelModel
from shoal.parallel.spmd.base import SpmdModel
from shoal.random_state import seed_everything
from shoal.sync.config import SyncConfig
from shoal.sync.synchronizer import Connection, Replica, StateAccess
from shoal.train.initial_weights import find_initial_weights, load_initial_weights
from shoal.train.optim.ema import WeightAverage
from shoal.train.optim.lr_schedule import (
    SchedulePosition,
    compute_learning_rate,
    compute_momentum,
    compute_schedule_position,
    is_schedule_active,
    needs_total_steps,
    resolve_total_steps,
)
from shoal.train.optim.optimizers import (
    OptimizerGroup,
    is_task_optimizer,
    make_optimizer,
    restore_spec_settings,
    set_learning_rate,
)
from shoal.train.optim.selective_backprop import SelectiveBackprop
from shoal.train.run_facts import adopt_batch_size, epochs_to_steps, make_facts, needs_even_batches
from shoal.train.spec import TrainSpec
from shoal.train.stateful_metric import MetricSet
from shoal.train.task import Task, build_model, load_data

AVERAGE = "average"  # its key in the state; missing in a run that began without one
OUTER_MOMENTUM = "outer_momentum"  # of DiLoCo; missing in a run of another kind
HAS_STATE = "begun"  # the parameters with optimiser state


class BatchStream:
    """The training data without end: epoch after epoch, from the loader's position."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self._batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def next(self) -> Any:
        """This rank's share of the next global batch. Raises DataError."""
        return next(self._batches)


@dataclass
class TrainComponents:
    """The components. `steps_per_epoch` is None if the data has no length.

    num_parameters: of the whole model; a tied one counts once
    stateful:       the Task's metrics that are no means over samples
    eager_reason:    why each rank of a plan that shards or splits the model has built it whole; "" where none has
    """

    spec: TrainSpec
    task: Task
    degrees: ParallelDims
    model: ParallelModel
    optimizer: Optimizer
    training: Loader
    stream: BatchStream
    validation: Loader | None
    average: WeightAverage | None
    selective: SelectiveBackprop | None
    steps_per_epoch: int | None
    num_parameters: int
    stateful: MetricSet
    eager_reason: str = ""
    finished_steps: int | None = None  # of the run, where replicas are at steps of their own
    outer: Optimizer | None = None  # that of the servers, of the same parameters, where workers take local steps

    def train_step(self, batch: Any, step: int) -> Tensor:
        """Run one step over this rank's share: computes the gradients, returns the mean loss, detached."""
        if self.selective is not None:
            return self.selective.train_step(batch, step)
        return self.model.train_step(batch, step, self.training.relative_share)

    @property
    def step_weight(self) -> Tensor | float:
        """The weight of the newest step's loss in a mean over steps; Selective Backprop's is the mean over samples."""
        return 1.0 if self.selective is not None else self.model.step_weight

    @property
    def has_phases(self) -> bool:
        """Whether several optimisers take their steps within a step of the run."""
        return isinstance(self.optimizer, OptimizerGroup)

    def take_phase_step(self, name: str) -> None:
        """The step of one of the Task's optimisers, in the middle of a step of the run."""
        assert isinstance(self.optimizer, OptimizerGroup)
        if self.spec.clip_norm is not None:
            self.model.clip_gradients(self.spec.clip_norm)
        self.optimizer.members[name].step()
        self.model.on_optimizer_step()
        for _, parameter in self.model.named_parameters():
            parameter.grad = None  # at the end of the run's step, no optimiser is left to step

    @property
    def epoch(self) -> float:
        """Finished epochs: with a fraction if the length of one is known, otherwise an integer."""
        steps = self._epoch_steps()
        if steps is not None and self.steps_per_epoch is not None:
            return steps / self.steps_per_epoch
        # Whether anything happens at the end of an epoch; otherwise an iterable need not be read ahead.
        is_evaluated_by_it = self.validation is not None and self.spec.evaluate.every_steps is None
        is_epoch_counted = self.spec.stop.epochs is not None or is_evaluated_by_it
        return float(self.training.epoch + (is_epoch_counted and self.training.is_at_end()))

    def get_schedule_position(self, step: int) -> SchedulePosition:
        """The schedule position after `step` steps."""
        return compute_schedule_position(self.spec, step, self._epoch_steps(), self.steps_per_epoch)

    def set_learning_rate(self, step: int) -> None:
        """Set the learning rate for the step after `step` steps.

        With the default schedule, a Task's own optimiser is unchanged, since it may have a schedule of its own.
        """
        if not is_schedule_active(self.spec.schedule):
            if not is_task_optimizer(self.optimizer):
                set_learning_rate(self.optimizer, 1.0)
            return
        schedule, place = self.spec.schedule, self.get_schedule_position(step)
        at = place.step if needs_total_steps(schedule) else step
        momentum = compute_momentum(at, schedule, place.total_steps, step)
        set_learning_rate(self.optimizer, compute_learning_rate(at, schedule, place.total_steps, step), momentum)

    def num_evaluations_due(self, step: int) -> int:
        """The number of evaluations due within `step` steps."""
        every, steps = self.spec.evaluate, self._epoch_steps()
        if every.every_steps is not None:
            return step // every.every_steps
        if steps is None or self.steps_per_epoch is None:
            return int(self.epoch / every.every_epochs)
        return int(steps // epochs_to_steps(every.every_epochs, self.steps_per_epoch))

    def _epoch_steps(self) -> float | None:
        """The finished epochs, in steps of the present batch size; None for an iterable.

        Computed from the data position, not from the steps: earlier attempts may have had another batch size.
        """
        if self.steps_per_epoch is None:
            return None
        data = self.training
        if self.finished_steps is not None:
            return float(self.finished_steps)
        within = self.steps_per_epoch if data.is_at_end() else data.position / self.spec.batch_size
        return data.epoch * self.steps_per_epoch + within

    def apply_average(self) -> AbstractContextManager[None]:
        """Within the context, the model has the averaged weights, if the spec asks for an average."""
        return self.average.apply() if self.average is not None else nullcontext()

    # -- what there is to save ------------------------------------------------------------------------------------

    def network_state(self) -> dict[str, Any]:
        """The network and its average: to be saved, or to be filled."""
        state: dict[str, Any] = {"model": self.model.model_state()}
        if self.average is not None:
            state[AVERAGE] = self.average.state_dict()
        return state

    def load_network_state(self, state: dict[str, Any]) -> None:
        """Load a `network_state` that a checkpoint has filled; a missing average starts anew."""
        self.model.load_model_state(state["model"])
        if self.average is not None and AVERAGE in state:
            self.average.load_state_dict(state[AVERAGE])
        elif self.average is not None:
            self.average.reset()

    def state(self, *, to_fill: bool = False) -> dict[str, Any]:
        """The network and the optimiser, to be saved or, `to_fill`, to be filled."""
        # Saving creates optimiser state for parameters without a gradient so far; a first gradient creates it anew.
        begun = {name: bool(self.optimizer.state.get(each)) for name, each in self._iter_trained()}
        optimizer = self.model.optimizer_state(self.optimizer, to_fill=to_fill)
        state = {**self.network_state(), "optimizer": optimizer, HAS_STATE: begun}
        if self.outer is not None and any(group.get("momentum") for group in self.outer.param_groups):
            stored = {name: self.outer.state[each].get("momentum_buffer") for name, each in self._iter_trained()}
            state[OUTER_MOMENTUM] = {  # it is zero before the first step of the outer optimiser
                name: torch.zeros_like(each) if stored[name] is None else stored[name]
                for name, each in self._iter_trained()
            }
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a `state` that a checkpoint has filled; the optimiser settings of the spec are kept."""
        self.load_network_state(state)
        self.model.load_optimizer_state(self.optimizer, state["optimizer"])
        for name, each in self._iter_trained():
            if not state[HAS_STATE][name]:
                self.optimizer.state.pop(each, None)
        if self.outer is not None and OUTER_MOMENTUM in state:
            for name, each in self._iter_trained():
                self.outer.state[each]["momentum_buffer"] = state[OUTER_MOMENTUM][name]
        restore_spec_settings(self.optimizer, self.spec.optimizer)

    def _iter_trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, each) for name, each in self.model.named_parameters() if each.requires_grad)

    def get_rank_position(self) -> dict[str, Any]:
        """The part of the position that belongs to this rank."""
        own: dict[str, Any] = {"data": self.training.state_dict()}
        if self.selective is not None:
            own["selective"] = self.selective.state_dict()
        return own

    def load_selective(self, own: dict[str, Any]) -> None:
        """Restore Selective Backprop's part of this rank's position, saved under the same plan, if any."""
        if self.selective is not None and "selective" in own:
            self.selective.load_state_dict(own["selective"])

    def get_counts(self) -> dict[str, Any]:
        """Further state, the same on every rank: evaluations, the scale of an fp16 loss, whether a schedule was
        active."""
        evaluated = 0 if self.validation is None else self.validation.epoch
        is_scheduled = is_schedule_active(self.spec.schedule)
        return {"evaluated": evaluated, "scale": self.model.loss_scale_state(), "is_scheduled": is_scheduled}

    def load_counts(self, counts: dict[str, Any]) -> None:
        """Restore `get_counts`; the validation data's random numbers follow from it."""
        self.model.load_loss_scale_state(counts["scale"])
        if counts["is_scheduled"]:  # a run resumed without its schedule uses the optimiser's rates
            set_learning_rate(self.optimizer, 1.0)
        if self.validation is not None:
            self.validation.seek(counts["evaluated"])

    # -- what other replicas need ---------------------------------------------------------------------------------

    def get_replica_state(self) -> dict[str, Any]:
        """What a replica that joins begins with."""
        return {"state": self.state(), "counts": self.get_counts()}

    def load_replica_state(self, given: dict[str, Any]) -> None:
        self.load_state(given["state"])
        self.load_counts(given["counts"])

    def get_gradient_weights(self) -> tuple[float, float]:
        """As `StateAccess.get_weights`, of the newest gradients."""
        weight = self.model.step_weight
        if isinstance(weight, Tensor):  # of a `Mean`, by which its gradients are not multiplied yet
            return float(weight), float(weight)
        return 1.0, self.training.relative_share

    def close(self) -> None:
        """Close loaders and plan. Idempotent."""
        self.training.close()
        if self.validation is not None:
            self.validation.close()
        self.model.close()


def _require_data_fits(spec: TrainSpec, data: Data, world: World) -> None:
    if is_stream(data.train) and world.size > 1:
        problem = f"is a stream, which {world.size} processes cannot share"
        raise ConfigError("data", type(data.train).__name__, problem, "use workers=1")
    if spec.selective_backprop is not None and hasattr(data.train, "sample_sizes"):
        problem = "needs samples that are rows of tensors, and as many on each rank; this dataset has `sample_sizes`"
        raise ConfigError("selective_backprop", type(data.train).__name__, problem, "leave it out")


def build_components(
    spec: TrainSpec, task: Task, world: World, replica: tuple[int, int] | None = None
) -> TrainComponents:
    """Build everything for this rank of `world`.

    replica: (index, number) of this process among replicas that no plan connects; each reads its share of the training
             data, and all of the validation data

    Raises PlanError, DataError and ConfigError, on every rank alike, before any communication.
    """
    ranks_per_host = world.count_ranks_per_host() if spec.parallel.replicate == "hosts" else None
    degrees = spec.parallel.resolve_dims(world.size, ranks_per_host)
    data = load_data(task, spec.task)
    spec = adopt_batch_size(spec, data)
    spec.parallel.compute_micro_batch_size(spec.batch_size, degrees)
    _require_data_fits(spec, data, world)
    training, validation = _make_loaders(spec, data, world, degrees, replica)
    task.setup(make_facts(spec, training.num_batches, *(replica or (world.rank, world.size))))
    seed_everything(spec.seed)
    network, deferred, eager_reason = _build_network(spec, task, degrees)
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    example = load_first_batch(data, spec.batch_size // (replica[1] if replica else degrees.data), world.device)
    model = parallelize(network, task, spec.parallel, degrees, world, example, spec.seed, deferred)
    model.loss_reader.is_active |= spec.splits_batches
    has_full_model = not degrees.shard and degrees.tensor == degrees.pipeline == 1
    optimizer = make_optimizer(
        task,
        spec.optimizer,
        [parameter for _, parameter in model.named_parameters()],
        model.modules[0] if has_full_model else None,
    )
    steps_per_epoch = training.num_batches
    resolve_total_steps(spec, steps_per_epoch)
    chosen = spec.selective_backprop
    is_counted = degrees.coordinates(world.rank).tensor == 0
    metrics, finish = task.stateful_metrics(), task.finish_evaluation
    stateful = MetricSet(metrics, task.update_metric, world, is_counted, finish)
    parts = TrainComponents(
        spec,
        task,
        degrees,
        model,
        optimizer,
        training,
        BatchStream(training),
        validation,
        average=WeightAverage(model, spec.average) if spec.average is not None else None,
        selective=SelectiveBackprop(chosen, model, task, spec.seed) if chosen is not None else None,
        steps_per_epoch=steps_per_epoch,
        num_parameters=num_parameters,
        stateful=stateful,
        eager_reason=eager_reason if deferred is None else deferred.eager_reason,
    )
    if isinstance(optimizer, OptimizerGroup):  # the Task's optimisers take their steps in turn
        assert isinstance(model, SpmdModel)
        model.use_optimizers(optimizer.get_parameters(), parts.take_phase_step)
    return parts


def _make_loaders(
    spec: TrainSpec, data: Data, world: World, degrees: ParallelDims, replica: tuple[int, int] | None
) -> tuple[Loader, Loader | None]:
    """Of the training data, and of the validation data."""
    share = (degrees.coordinates(world.rank).data, degrees.data)
    options: dict[str, Any] = {"seed": spec.seed, "spec": spec.loader, "device": world.device}
    options["is_even"] = needs_even_batches(spec, degrees)
    training = make_loader(data, "train", batch_size=spec.batch_size, share=replica or share, **options)
    if data.validation is None:
        return training, None
    size = spec.evaluate.batch_size or data.get_settings("validation").batch_size or spec.batch_size
    return training, make_loader(data, "validation", batch_size=size, share=share, **options)


def _build_network(spec: TrainSpec, task: Task, degrees: ParallelDims) -> tuple[nn.Module, DeferredWeights | None, str]:
    """The model with its first weights; if its plan shards or splits it, without memory for them, which it gets then.
    Or, where that is impossible, the reason."""
    reason = ""
    if degrees.is_sharded or degrees.tensor > 1 or degrees.pipeline > 1:
        try:
            network, deferred = build_deferred(lambda: build_model(task, spec.task))
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:  # if it is the user's, it comes again
            reason = str(error).partition("\n")[0] or type(error).__name__
        else:
            deferred.given = find_initial_weights(network, spec.init or task.initial_weights())
            return network, deferred, ""
    network = build_model(task, spec.task)
    load_initial_weights(network, spec.init or task.initial_weights())
    return network, None, reason


def set_threads(spec: TrainSpec, cores: int) -> None:
    """Set torch's threads to the spec's number, or to this rank's part of the cores."""
    torch.set_num_threads(spec.threads or max(1, cores // spec.workers))


@dataclass(frozen=True, kw_only=True)
class TrainReplica(Replica):
    """A Replica with all of its components, for synchronizers that take part in the loop, such as Hogwild's."""

    parts: TrainComponents

    @classmethod
    def of_components(
        cls, parts: TrainComponents, config: SyncConfig, world: World, connection: Connection | None
    ) -> TrainReplica:
        return cls(
            config=config,
            model=parts.model,
            optimizer=parts.optimizer,
            world=world,
            state=StateAccess(parts.get_replica_state, parts.load_replica_state, parts.get_gradient_weights),
            connection=connection,
            parts=parts,
        )
