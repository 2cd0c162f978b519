"""The configuration of a training run. `shoal run train a.b=c` sets any of these fields.

Used by jobs, the CLI and the Trainer. Has no behaviour beyond properties of its fields.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from shoal.config import Spec
from shoal.data import LoaderSpec
from shoal.errors import ConfigError, suggest
from shoal.parallel import ParallelDims, ParallelSpec
from shoal.plugins.find import load_reference
from shoal.registry import AliasNames, Criterion
from shoal.runs.formatting import Duration
from shoal.runs.json_lines import LogFormat
from shoal.runs.run_reader import infer_direction, is_higher_better
from shoal.runs.tracker import TrackerNames
from shoal.sync.config import AllReduceConfig, AnySyncConfig, SyncConfig

Direction = Literal["auto", "max", "min"]
Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSpec(Spec):
    """The optimiser, unless the Task creates its own.

    name:          the words with `8bit` are torchao's Adams with states of eight bits
    learning_rate: the peak of the schedule
    weight_decay, betas, fused: as torch's optimisers take them
    """

    name: Literal["adam", "adamw", "sgd", "adam_8bit", "adamw_8bit"] = "adam"
    learning_rate: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    momentum: float = Field(default=0.9, ge=0, lt=1, description="sgd only")
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    fused: bool = True


class ScheduleSpec(Spec):
    """The learning rate by step, as a share of `optimizer.learning_rate`.

    name:      its shape
    one_cycle: up from 1/25 to 1 within `warmup` of the run (0.3 when 0), down to 1e-4, both by cosines; the momentum
               goes from 0.95 to 0.85 and back (arXiv:1708.07120)
    cosine:    after the warm-up, down to `final` by half a cosine (arXiv:1608.03983)
    warmup:    steps, or a share of the run below 1
    final:     where it ends, except of constant; 0 of one_cycle: 1e-4
    total_steps: its length; None: up to the nearest end in `stop`
    """

    name: Literal["constant", "one_cycle", "cosine", "linear"] = "constant"
    warmup: float = Field(default=0.0, ge=0)
    final: float = Field(default=0.0, ge=0, le=1)
    total_steps: int | None = Field(default=None, ge=1)


class MeasureSpec(Spec):
    """A metric of the validation data, and which of its values is better."""

    metric: str
    direction: Direction = "auto"

    @model_validator(mode="after")
    def _has_a_direction(self) -> Self:
        require_direction(self.metric, self.direction)
        return self

    @property
    def is_higher_better(self) -> bool:
        return is_higher_better(self.metric) if self.direction == "auto" else self.direction == "max"


class TargetSpec(MeasureSpec):
    """Stop when a validation metric reaches a value."""

    value: float

    def __str__(self) -> str:
        return f"{self.metric}{'>=' if self.is_higher_better else '<='}{self.value:g}"


class ConvergenceSpec(MeasureSpec):
    """Stop when none of `patience` evaluations after n beats it by over `min_improvement`; network n is retained."""

    metric: str = "loss"
    patience: int = Field(default=3, ge=1)
    min_improvement: float = Field(default=0.0, ge=0)


class StopSpec(Spec):
    """When a run ends: the first criterion that is met counts, and enters the record.

    steps, epochs: so many
    wall_s:        seconds of training and evaluation, over all attempts and resumptions
    target:        an evaluation that meets it, as 'accuracy>=0.9'
    convergence:   an evaluation that is better than the next `patience`: its network is retained
    money:         in `price_per_device_hour`'s currency, over all workers
    """

    steps: int | None = Field(default=None, ge=1)
    epochs: float | None = Field(default=None, gt=0)
    wall_s: float | None = Field(default=None, gt=0)
    money: float | None = Field(default=None, gt=0)
    target: TargetSpec | None = None
    convergence: ConvergenceSpec | None = None

    @field_validator("target", mode="before")
    @classmethod
    def _parse_target(cls, value: object) -> object:
        """Accept `accuracy>=0.9` and `loss<=0.1` as targets."""
        if not isinstance(value, str):
            return value
        for sign, direction in ((">=", "max"), ("<=", "min")):
            metric, found, limit = value.partition(sign)
            if found:
                return {"metric": metric.strip(), "value": limit.strip(), "direction": direction}
        raise ValueError("write it as metric>=value or metric<=value")

    @property
    def is_empty(self) -> bool:
        return all(getattr(self, name) is None for name in type(self).model_fields)


class EvaluateSpec(Spec):
    """When to evaluate on the validation data; without any nothing is evaluated."""

    every_steps: int | None = Field(default=None, ge=1, description="None: by every_epochs")
    every_epochs: float = Field(default=1.0, gt=0, description="unless every_steps is given")
    batch_size: int | None = Field(default=None, ge=1, description="global; that of training when None")
    samples: int = Field(default=0, ge=0, le=64, description="whose predictions each evaluation draws; 0: none")


class CheckpointSpec(Spec):
    """When to save the run, in addition to its end and an interruption.

    every_steps:  None: by every_s
    keep:         the newest that stay, besides the best one
    asynchronous: training goes on while a copy of the state is written; false: it waits, and no host memory of the
                  state's size is needed
    """

    every_steps: int | None = Field(default=None, ge=1)
    every_s: float = Field(default=60.0, gt=0, allow_inf_nan=True, description="unless every_steps is given")
    keep: int = Field(default=2, ge=1)
    asynchronous: bool = True


class SelectiveSpec(Spec):
    """Selective Backprop (arXiv:1910.00762): the backward pass of samples with high losses only.

    beta:    a sample is chosen with probability (percentile of its loss among recent ones) ** beta
    history: the number of recent losses for the percentile
    """

    beta: float = Field(default=1.0, ge=0)
    history: int = Field(default=4096, ge=16)


class TrainSpec(Spec):
    """One training run.

    task:                  `lenet` (a file of ./jobs), `my_task.py:MyTask`, or `package.module:MyTask`
    args:                  the Task's keyword arguments
    init:                  the weights to begin with: NAME@VERSION of the registry, a file of a state dict, or a folder
                           of safetensors, as ./FOLDER, or of a distributed checkpoint; "": the Task's
                           `initial_weights`, fresh ones by default
    workers:               processes that train; `[min, max]` sets min_workers too
    min_workers:           with workers that may leave and join: the fewest with which the run goes on; None: `workers`
    batch_size:            over the whole group: each data rank gets its share
    seed:                  of the model's weights, the order of samples and all random numbers of the run
    device:                auto: CUDA where there is a GPU
    clip_norm:             bound of the norm of the full gradient
    histograms_every_steps: of weights and gradients, in TensorBoard's files
    selective_backprop:    backward passes of samples with high losses only, as selective_backprop.beta=1
    resume:                a run to continue, by its id, or `latest`
    check_loss:            require that a loss or a metric of several samples is the mean of each one's, where batches
                           are split or evaluated; false: it is meant as the mean of what each part gives
    average:               decay of an exponential moving average of the weights, to be evaluated and registered
    price_per_device_hour: for cost-to-accuracy and `stop.money`
    wait:                  how long the workers may wait for their places, as 30m or seconds; None: 30m where an
                           autoscaler may add nodes, 10m where other runs are on, else 10 s
    priority:              of the runs that wait for places, those with a higher one start first
    logs:                  json: each line of the driver's output, and of the workers' logs, is an object
    track:                 where its record is mirrored to: mlflow, wandb, trackio
    threads:               of torch, in each worker; None divides this machine's cores among the workers
    name:                  in the registry, and of the run; "" takes the Task's name, `{data}` the stem of the file
                           `args.data`
    aliases:               of the registered version; None: `champion`, if it is the best so far by `stop.target`'s
                           metric, else by `stop.convergence`'s, else by the loss, on the same validation data
    """

    main_fields = (
        "task",
        "args",
        "parallel.data",
        "workers",
        "batch_size",
        "device",
        "optimizer.name",
        "optimizer.learning_rate",
        "stop.epochs",
        "name",
        "resume",
    )
    page = "training.md"

    task: str = ""
    args: dict[str, Any] = Field(default_factory=dict)
    parallel: ParallelSpec = ParallelSpec()
    sync: AnySyncConfig = AllReduceConfig()
    workers: int = Field(default=1, ge=1)
    min_workers: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=64, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**63)  # torch's range
    device: Literal["auto", "cpu", "cuda"] = "auto"
    wait: Duration | None = None
    priority: int = 0
    track: TrackerNames = ()
    logs: LogFormat = "text"
    threads: int | None = Field(default=None, ge=1)
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    loader: LoaderSpec = LoaderSpec()
    stop: StopSpec = StopSpec()
    evaluate: EvaluateSpec = EvaluateSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    clip_norm: float | None = Field(default=None, gt=0, allow_inf_nan=True)  # .inf: measure the norm without clipping
    average: float | None = Field(default=None, gt=0, lt=1)
    selective_backprop: SelectiveSpec | None = None
    check_loss: bool = True
    price_per_device_hour: float = Field(default=0.0, ge=0)
    log_every_steps: int | None = Field(default=None, ge=1, description="None: about twice a second")
    histograms_every_steps: int | None = Field(default=None, ge=1)
    init: str = ""
    name: str = ""
    aliases: AliasNames | None = None
    resume: str = ""

    @classmethod
    def from_record(cls, text: str, overrides: Iterable[str] = (), *, leave_out: Collection[str] = ()) -> Self:
        """With overrides as `override` takes them."""
        return super().from_record(text, leave_out=leave_out).override(overrides)

    def override(self, overrides: Iterable[str]) -> Self:
        """Also accepts an argument of the Task by its own name, where no field has it: `hidden=64`."""
        return super().override([self.qualify(each) for each in overrides])

    def qualify(self, override: str) -> str:
        """`args.NAME=value` for an argument of the Task, another override as it is. Raises ConfigError."""
        name = re.split(r"[.=\[]", override, maxsplit=1)[0]
        if name in type(self).model_fields or not name.isidentifier() or not self.task or "=" not in override:
            return override
        factory = load_reference("shoal.train.task:find_task")(self.task)  # a module above this one, which loads torch
        arguments = inspect.signature(factory).parameters
        if name in arguments:
            return f"args.{override}"
        path, _, value = override.partition("=")
        last = path.rpartition(".")[2]  # of `model.depht`, where `depth` is an argument
        remedy = suggest(name, arguments, least=0.8) or suggest(last, arguments, least=0.8)
        if remedy and not suggest(name, type(self).model_fields, least=0.8):
            raise ConfigError(path, value, "no such field", remedy)
        return override

    @model_validator(mode="before")
    @classmethod
    def _parse_worker_range(cls, values: object) -> object:
        """Accept `workers: [min, max]`."""
        if isinstance(values, dict) and isinstance(values.get("workers"), list | tuple):
            if len(values["workers"]) != 2:
                raise ValueError(f"workers={values['workers']}: give a number, or [min, max]")
            fewest, most = values["workers"]
            return {**values, "workers": most, "min_workers": fewest}
        return values

    @field_validator("args", mode="after")
    @classmethod
    def _args_outlast_the_record(cls, args: dict[str, Any]) -> dict[str, Any]:
        """A resumed run reads its arguments from its record, so they must survive YAML."""
        return {name: _to_plain(value, name) for name, value in args.items()}

    @model_validator(mode="after")
    def _fits_together(self) -> TrainSpec:
        if self.stop.money is not None and not self.price_per_device_hour:
            raise ValueError("stop.money needs a price_per_device_hour")
        if self.selective_backprop is not None and self.parallel.pipeline != 1:
            raise ValueError("selective_backprop does not go with a pipeline: no rank sees both samples and losses")
        if not self.applied_sync.admits_parallel:
            self._require_full_models(self.applied_sync)
        self.applied_sync.check_run(self.workers, self.batch_size)
        if self.device == "cuda" and not self.applied_sync.admits_cuda:
            field, value = self.applied_sync.chosen_by
            raise ValueError(f"device=cuda does not go with {field}={value}: use device=cpu, whose memory lanes share")
        if self.min_workers is not None and self.min_workers > self.workers:
            raise ValueError(f"min_workers={self.min_workers} is more than workers={self.workers}")
        return self

    def choose_criterion(self, metrics: Iterable[str]) -> Criterion:
        """By which of its metrics a registered version is compared: the loss, unless `stop` names one."""
        if measure := self.stop.target or self.stop.convergence:
            return Criterion(measure.metric, measure.is_higher_better)
        losses = [name for name in metrics if name.endswith("loss")]
        return Criterion(losses[0] if len(losses) == 1 else "loss", is_higher_better=False)  # or the only `val_loss`

    @property
    def applied_sync(self) -> SyncConfig:
        """How the replicas of this run stay one model: `sync`, unless `workers` or `sync.hogwild` make it another."""
        return self.sync.resolve(self.workers, self.min_workers)

    @property
    def has_replicas(self) -> bool:
        """Whether each worker is a replica of its own, which may be replaced while the others go on."""
        return self.applied_sync.has_replicas

    @property
    def splits_batches(self) -> bool:
        """Whether a step adds up what several parts of a batch give."""
        dims = self.resolve_dims()
        is_divided = dims.data > 1 or dims.pipeline > 1 or (self.has_replicas and self.workers > 1)
        return is_divided or self.parallel.accumulate > 1 or self.sync.micro_batches > 1

    def _require_full_models(self, sync: SyncConfig) -> None:
        """What does not go with workers, or lanes, that have a model of their own each."""
        degrees = self.parallel
        if degrees.shard or degrees.tensor != 1 or degrees.pipeline != 1 or degrees.data not in (None, 1):
            field, value = sync.chosen_by
            raise ValueError(f"{field}={value}: each worker has the whole model; leave out `parallel`")
        if self.selective_backprop is not None:
            raise ValueError(f"selective_backprop does not go with sync={self.sync.kind}: no worker sees all samples")
        if self.average is not None and not sync.has_every_step:
            raise ValueError(f"average does not go with sync={self.sync.kind}: no worker sees every step")
        if self.batch_size % self.workers:
            raise ValueError(f"batch_size={self.batch_size} does not divide by {self.workers} workers")

    def resolve_dims(self) -> ParallelDims:
        """The degrees of the plan. Raises PlanError when they do not fit the workers."""
        return self.parallel.resolve_dims(self.workers)


def require_direction(metric: str, direction: Direction) -> None:
    """Raises ValueError when the direction is unknown: the worst network might be retained as the best."""
    if direction == "auto" and infer_direction(metric) is None:
        raise ValueError(
            f"direction: the name {metric!r} does not tell whether more is better: say direction=max or min"
        )


def _to_plain(value: Any, path: str) -> Any:
    """The value, or an equal one, of types that survive YAML. Raises ValueError for others."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return float(value)
        case list() | tuple():
            return [_to_plain(each, f"{path}[{number}]") for number, each in enumerate(value)]
        case dict() if all(isinstance(name, str) for name in value):
            return {name: _to_plain(each, f"{path}.{name}") for name, each in value.items()}
    remedy = "say it as a text, a number, or a list or dictionary (by texts) of these"
    raise ValueError(
        f"{path} = {value!r} ({type(value).__name__}) would be another value when the run is resumed: {remedy}"
    )
