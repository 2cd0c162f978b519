"""Checks of a run, and facts about it, before a worker starts.

Called by the launchers: the words in the process that starts a run, the rest there or, on a cluster, in a worker.
Builds the Task, its data and its network once, and releases them again; a large network is of fake tensors. Takes no
step.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer, Rprop

import shoal.runs
from shoal.cost.fake_tensors import ModelTooLarge, build_small_model, use_fake_tensors
from shoal.data import Data
from shoal.data.dataset import is_stream, length_of
from shoal.data.fingerprint import fingerprint
from shoal.data.loader import load_first_batch, make_loader
from shoal.errors import ConfigError, DataError, OutOfMemory, PlanError, ShoalError, summarize_error
from shoal.parallel.loss import require_loss
from shoal.parallel.loss_trace import watch_gradients
from shoal.parallel.state.module_snapshot import eval_mode
from shoal.parallel.validate import check_plan
from shoal.random_state import preserve_rng, seed_everything
from shoal.registry import ModelFactory, Registry, Signature
from shoal.runs.record.event_log import EventLog
from shoal.train.export.model_entry import make_factory, make_model_name
from shoal.train.export.signature import infer_signature
from shoal.train.initial_weights import load_initial_weights
from shoal.train.loop.evaluation import load_sample_sheet
from shoal.train.loop.oom import is_out_of_memory
from shoal.train.optim.lr_schedule import resolve_total_steps
from shoal.train.run_facts import adopt_batch_size, make_facts, needs_even_batches
from shoal.train.shape_errors import BroadcastTrap, explain_shapes
from shoal.train.spec import OptimizerSpec, TrainSpec
from shoal.train.task import Task, build_model, find_task, load_data, make_task, require_source_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ValidatedRun:
    """The facts about a run before it starts.

    factory:     how to build the network again, for the registry; with the present source
    signature:   of the network, for the registry
    fingerprint: of the data, by part, after the name of its class
    metric_names: of an evaluation; () without validation data
    batch_size, loader_batch_size: of the run, and of the DataLoader of torch that the training data was
    fitted:      the Task's arguments that follow from the data
    """

    factory: ModelFactory
    signature: Signature
    fingerprint: dict[str, str]
    num_parameters: int
    steps_per_epoch: int | None
    metric_names: tuple[str, ...]
    batch_size: int
    loader_batch_size: int | None
    fitted: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()

    def apply_to(self, spec: TrainSpec) -> TrainSpec:
        """The spec with what the data brings, arguments and a batch size: as the record has it, a resumed run keeps
        it."""
        spec = spec if spec.batch_size == self.batch_size else spec.update({"batch_size": self.batch_size})
        return spec.update({"args": {**spec.args, **self.fitted}}) if self.fitted else spec

    def log_data(self, log: EventLog) -> None:
        """Say what is to be noted of the data, and that the run's batch size is used, not another of its DataLoader."""
        for note in self.notes:
            log.record_event("data_noted", note=note)
        if self.loader_batch_size not in (None, self.batch_size):
            log.record_event("batch_size_given", used=self.batch_size, loader=self.loader_batch_size)


class ModelFacts(NamedTuple):
    """What a run needs to know of its network; `metric_names` as of an evaluation."""

    num_parameters: int
    metric_names: list[str]
    signature: Signature


def validate_run(spec: TrainSpec) -> ValidatedRun:
    """Raises ConfigError, PlanError or DataError with field, value and remedy, for an invalid run."""
    validate_spec(spec)
    return validate_task(spec)


def validate_spec(spec: TrainSpec) -> None:
    """Raises as `validate_run`, for what is seen without the Task. Reads the registry and the record."""
    if not (spec.task or spec.resume):
        raise ConfigError("task", "", "is missing", "give task=my_task.py:MyTask, or the name of a recipe")
    require_source_file(spec.task)
    _require_unfinished(spec)
    if "batch_size" in spec.model_fields_set:  # else the data may bring one
        spec.parallel.compute_micro_batch_size(spec.batch_size, spec.parallel.resolve_dims(spec.workers))
    if spec.stop.is_empty:
        find_task(spec.task)  # a class that is not there is said first
        raise ConfigError("stop", None, "nothing says when to end", "give stop.epochs=3, say, or stop.steps=1000")
    Registry().require_distinct_name("name", make_model_name(spec))
    # Accepts a name alone, or by device as in cpu:gloo,cuda:nccl.
    for part in filter(None, (spec.parallel.backend or "").split(",")):
        if not dist.is_backend_available(part.rpartition(":")[2]):
            remedy = "use gloo, or leave it out" if spec.device != "cuda" else "install a torch that has it"
            raise PlanError("parallel.backend", spec.parallel.backend, "is not in this torch", remedy)
    if spec.evaluate.samples:
        load_sample_sheet()


def validate_task(spec: TrainSpec) -> ValidatedRun:
    """Raises as `validate_run`, for what is seen by building the Task, its data and its network."""
    task = make_task(spec.task, spec.args)
    for name in ("model", "data", "loss"):
        if name == "loss" and task.train_step is not None:
            continue
        if getattr(type(task), name) is getattr(Task, name):
            problem = f"{type(task).__name__} has no method {name!r} of its own"
            raise ConfigError("task", spec.task, problem, f"write {name}: see shoal.train.Task")
    if spec.workers > 1 or spec.applied_sync.num_lanes > 1:
        try:
            pickle.dumps(task)
        except Exception as error:  # a user's object may raise anything
            problem = f"cannot be sent to workers: {type(error).__name__}: {error}"
            remedy = "open files, locks and generators in data(), not in __init__"
            raise ConfigError("task", spec.task, problem, remedy) from error
    data = load_data(task, spec.task)
    for name, part, remedy in (
        ("train", data.train, "look at the file or the split that it is made of"),
        ("validation", data.validation, "give it samples, or leave it out"),
        ("test", data.test, "give it samples, or leave it out"),
    ):
        if part is not None and length_of(part) == 0:
            raise DataError(f"data.{name}", type(part).__name__, "is empty", remedy)
    spec = adopt_batch_size(spec, data)
    samples = spec.parallel.compute_micro_batch_size(spec.batch_size, spec.parallel.resolve_dims(spec.workers))
    _require_stream_fits(spec, data)
    with preserve_rng():
        return _validate_model(spec, task, data, samples)


def _validate_model(spec: TrainSpec, task: Task, data: Data, samples: int) -> ValidatedRun:
    degrees = spec.parallel.resolve_dims(spec.workers)
    share = (0, degrees.data)
    # Starts no worker process before it is read, but checks whether it could.
    options: dict[str, Any] = {"share": share, "seed": spec.seed, "spec": spec.loader}
    is_even = needs_even_batches(spec, degrees)
    loader = make_loader(data, "train", batch_size=spec.batch_size, is_even=is_even, **options)
    try:
        batch, steps_per_epoch = load_first_batch(data, min(samples, 2)), loader.num_batches
    finally:
        loader.close()
    task.setup(make_facts(spec, steps_per_epoch, 0, spec.workers))
    # A tensor would be taken for its rows, and a dict for its keys.
    inputs: object = task.inputs(batch)
    if not isinstance(inputs, tuple | list):
        problem = f"{type(task).__name__}.inputs gave a {type(inputs).__name__}"
        remedy = "return a tuple of the model's arguments, as in (batch['x'],)"
        raise ConfigError("task", spec.task, problem, remedy)
    resolve_total_steps(spec, steps_per_epoch)
    seed_everything(spec.seed)
    validated = batch
    if task.eval_step is not None and data.validation is not None:
        with make_loader(data, "validation", batch_size=min(samples, 2)) as evaluating:
            validated = next(iter(evaluating))
    num_parameters, measured, signature = _check_model(spec, task, batch, validated)
    for field, each in (("stop.target", spec.stop.target), ("stop.convergence", spec.stop.convergence)):
        if each is None:
            continue
        if data.validation is None:
            problem = "needs an evaluation, and there is no validation data"
            raise ConfigError(f"{field}.metric", each.metric, problem, "give Data(validation=...)")
        if each.metric not in measured:
            remedy = f"there is {', '.join(measured)}"
            raise ConfigError(f"{field}.metric", each.metric, "is not evaluated", remedy)
    # If only evaluations end the run, they must happen: an iterable without a length may never end an epoch.
    stop = spec.stop
    has_limit = any(each is not None for each in (stop.steps, stop.epochs, stop.wall_s, stop.money))
    has_epochs = length_of(data.train) is not None or spec.evaluate.every_steps is not None
    if not (has_limit or has_epochs):
        problem = f"{type(data.train).__name__} has no length, and nothing but an evaluation ends the run"
        raise ConfigError("evaluate.every_steps", None, problem, "give evaluate.every_steps=500, say, or stop.steps")
    parts = {"train": data.train, "validation": data.validation, "test": data.test}
    known = {name: f"{type(data).__name__} {fingerprint(data)}" for name, data in parts.items() if data is not None}
    evaluated, fitted = tuple(measured) if data.validation is not None else (), dict(task.fit_args())
    factory = make_factory(spec.update({"args": {**spec.args, **fitted}}) if fitted else spec)
    facts = (num_parameters, steps_per_epoch, evaluated, spec.batch_size, data.get_settings("train").batch_size)
    return ValidatedRun(factory, signature, known, *facts, fitted, data.notes)


def _check_model(spec: TrainSpec, task: Task, batch: Any, validated: Any) -> ModelFacts:
    """The facts of the network, for a batch and one of validation data: on fake tensors if it is too large to be built
    here, and can be."""
    try:
        model = build_small_model(lambda: _build_model(task, spec))
    except ModelTooLarge:
        pass
    else:
        load_initial_weights(model, spec.init or task.initial_weights())
        with explain_shapes(task, model, batch):
            return _check_built_model(spec, task, model, batch, validated)
    try:
        with use_fake_tensors() as mode:  # weights to begin with are read and checked by the workers
            batches = mode.from_batch(batch), mode.from_batch(validated)
            return _check_built_model(spec, task, _build_model(task, spec), *batches)
    except ShoalError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a model's code raises of tensors without values
        logger.warning("the check builds the whole network: on fake tensors it raises %s", summarize_error(error))
    model = _build_model(task, spec)
    load_initial_weights(model, spec.init or task.initial_weights())
    return _check_built_model(spec, task, model, batch, validated)


def _check_built_model(spec: TrainSpec, task: Task, model: nn.Module, batch: Any, validated: Any) -> ModelFacts:
    degrees = spec.parallel.resolve_dims(spec.workers)
    device = None if spec.device == "auto" else spec.device  # what is known here of the workers' hosts
    check_plan(model, task, spec.parallel, degrees, batch, device)
    if task.train_step is not None and spec.selective_backprop is not None:
        problem = f"needs the loss of each sample, and {type(task).__name__} has a train_step of its own"
        raise ConfigError("selective_backprop", type(task).__name__, problem, "leave it out")
    sync = spec.applied_sync
    if task.optimizers(model) is not None and sync.one_optimizer is not None:
        why, remedy = sync.one_optimizer
        problem = f"{type(task).__name__} has several optimizers, and {why}"
        raise ConfigError(*sync.chosen_by, problem, remedy)
    _require_optimizer_fits(task, spec, model)
    measured = _find_metric_names(spec, task, model, validated)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelFacts(num_parameters, measured, infer_signature(task, model, batch))


def _require_unfinished(spec: TrainSpec) -> None:
    if not spec.resume:
        return
    before = shoal.runs.load(spec.resume)
    if not spec.task:
        loader = "shoal.train.launch.overrides.spec_from_overrides"
        remedy = f"{loader}(['resume={before.id}', ...]) begins with what its record says"
        raise ConfigError("task", spec.task, "is missing, and nothing is read from the run that is resumed", remedy)
    if before.status.is_complete and TrainSpec.from_record(before.spec).stop == spec.stop:
        detail = before.last_events().get("stopped", {}).get("detail", "its end was reached")
        remedy = "say when it ends now, as in stop.epochs=10"
        raise ConfigError("resume", before.id, f"has ended already ({detail})", remedy)


def _build_model(task: Task, spec: TrainSpec) -> nn.Module:
    try:
        return build_model(task, spec.task)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        problem = f"{type(task).__name__}.model needs more memory than there is ({summarize_error(error)})"
        raise OutOfMemory(f"{problem}. Make it smaller: each worker builds the whole of it first") from error


def _require_optimizer_fits(task: Task, spec: TrainSpec, model: nn.Module) -> None:
    """What workers, replicas and servers would find once they have started."""
    is_own = type(task).optimizer is not Task.optimizer or type(task).optimizers is not Task.optimizers
    degrees = spec.parallel.resolve_dims(spec.workers)
    is_split = degrees.is_sharded or degrees.tensor > 1
    if not spec.has_replicas and (not is_own or (spec.optimizer == OptimizerSpec() and not is_split)):
        return
    if spec.has_replicas and spec.optimizer.name in ("adam_8bit", "adamw_8bit"):
        problem = "has states in blocks of eight bits, which replicas and servers do not exchange"
        remedy = "use adam or adamw, or a plan of fixed workers"
        raise ConfigError("optimizer.name", spec.optimizer.name, problem, remedy)
    # Other runs check their words without the second that these take to load.
    from shoal.sync.synchronizer import find_synchronizer
    from shoal.train.optim.optimizers import make_optimizer

    optimizer = make_optimizer(task, spec.optimizer, model.parameters(), model)
    if spec.has_replicas:
        find_synchronizer(spec.applied_sync)
        spec.applied_sync.check_model(optimizer)
    elif is_split and not _is_elementwise(optimizer, model):
        problem = f"steps with a part of each parameter, and {type(optimizer).__name__} needs whole ones"
        raise PlanError("parallel", degrees.description, problem, "use parallel=ddp, or another optimizer, as AdamW")


def _is_elementwise(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether each state of a parameter is a number, or has its shape: a step of the smallest matrix shows it."""
    trained = [each for each in model.parameters() if each.requires_grad]
    parameter = min(trained, key=lambda each: (sum(size > 1 for size in each.shape) < 2, each.numel()))
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [each for each in optimizer.state[parameter].values() if isinstance(each, Tensor) and each.numel() > 1]
    return not isinstance(optimizer, Rprop) and all(each.shape == parameter.shape for each in states)


def _find_metric_names(spec: TrainSpec, task: Task, model: nn.Module, batch: object) -> list[str]:
    """What an evaluation will measure, by name. Raises ConfigError for what is no scalar."""
    with eval_mode(model), torch.no_grad():
        outputs = None if task.eval_step is not None else model(*task.inputs(batch))
        metrics: object = task.eval_step(model, batch) if task.eval_step else task.metrics(outputs, batch)
        if not isinstance(metrics, Mapping):
            problem = f"{type(task).__name__}.metrics gave a {type(metrics).__name__}"
            raise ConfigError("task", spec.task, problem, "return a dict of scalar tensors by name, {} for none")
        loss: dict[str, object] = {}
        if task.has_loss and not task.eval_step:
            with torch.enable_grad(), BroadcastTrap(batch):
                loss["loss"] = task.loss(watch_gradients(outputs)[0], batch)
        measured = {**loss, **metrics}
        later = task.finish_evaluation()
    if "loss" in metrics:
        problem = f"{type(task).__name__}.metrics has a 'loss', which would take the place of the loss itself"
        raise ConfigError("task", spec.task, problem, "give it another name")
    for name, value in measured.items():
        # A metric of shape [1] counts as a number; the first step of any plan rejects a loss of that shape.
        if name == "loss" or not isinstance(value, Tensor) or value.numel() != 1:
            require_loss(value, f"{type(task).__name__}.{'loss' if name == 'loss' else f'metrics: {name!r}'}")
    return [*measured, *task.stateful_metrics(), *later]


def _require_stream_fits(spec: TrainSpec, data: Data) -> None:
    """A stream has one reader and no end, and its broker waits for acknowledgements, which follow checkpoints."""
    for part, name in ((data.validation, "validation"), (data.test, "test")):
        if part is not None and is_stream(part):
            raise ConfigError("data", name, "is a stream, which an evaluation would read for ever", "give a dataset")
    if not is_stream(data.train):
        return
    if spec.workers > 1:
        raise ConfigError("workers", spec.workers, "cannot share a stream of messages", "use workers=1")
    if spec.stop.epochs is not None or (data.validation is not None and spec.evaluate.every_steps is None):
        field = "stop.epochs" if spec.stop.epochs is not None else "evaluate.every_steps"
        raise ConfigError(field, spec.stop.epochs, "a stream of messages has no epochs", "count in steps")
    limit, every = getattr(data.train, "max_unacknowledged", None), spec.checkpoint.every_steps
    if limit is None:
        return
    if every is None:
        problem = "is by time, and a broker that waits for an acknowledgement sends nothing to train on until then"
        raise ConfigError("checkpoint.every_steps", None, problem, "give a number of steps")
    if (needed := (2 * every + 1) * spec.batch_size) > limit:
        problem = f"needs {needed} messages before the first of them is acknowledged, and the broker sends {limit}"
        raise ConfigError("checkpoint.every_steps", every, problem, "lower it or batch_size, or raise receive_maximum")


def choose_metric(names: Sequence[str], spec: TrainSpec, wished: str | None = None) -> str:
    """The first metric of the table: `wished`, that of `stop`, or the first that is not the loss.

    names: the metrics of an evaluation

    Raises ConfigError for an unknown one.
    """
    for watched in (wished, spec.stop.target and spec.stop.target.metric):
        if watched:
            if watched not in names:
                raise ConfigError("--metric", watched, "is not evaluated", f"there is {', '.join(names) or 'none'}")
            return watched
    if not names:
        raise ConfigError("task", spec.task, "is not evaluated", "give Data(validation=...)")
    return next((name for name in names if name != "loss"), names[0])
