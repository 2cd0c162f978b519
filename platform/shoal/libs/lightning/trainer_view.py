"""What a LightningModule finds as `self.trainer`: the run as Lightning names it.

Owns the names and their values; `events` keeps them current. Imports nothing of Lightning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.distributed as dist

from shoal.errors import ConfigError
from shoal.extend.train import RunFacts, TrainingState


class TrainerAttributeError(ConfigError, AttributeError):
    """A module asks its trainer for what this one does not have. `field` is the attribute."""


class RunLogger:
    """`self.logger`: metrics that a module logs itself enter the run's record."""

    name = "shoal"

    def __init__(self, state: TrainingState) -> None:
        self._state, self.version = state, state.folder.name
        self.save_dir = self.log_dir = str(state.folder)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add them to the record, at the present step."""
        self._state.log({name: float(value) for name, value in metrics.items()})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the record has the Task's arguments."""

    def __getattr__(self, name: str) -> Any:
        raise _make_error("self.logger", name, "log numbers with self.log, or pictures as PNG in TrainingState.folder")


def _count_steps(run: RunFacts) -> int:
    if run.total_steps is None:
        problem = "is not known, and the module's configure_optimizers asks for it"
        raise ConfigError("estimated_stepping_batches", None, problem, "give stop.epochs or stop.steps")
    return run.total_steps


_OF_RUN: dict[str, Callable[[Any], Any]] = {
    "max_epochs": lambda run: -1 if run.epochs is None else math.ceil(run.epochs),
    "max_steps": lambda run: run.steps or -1,
    "accumulate_grad_batches": lambda run: run.accumulate,
    "gradient_clip_val": lambda run: run.clip_norm,
    "precision": lambda run: run.precision,
    "num_training_batches": lambda run: (run.steps_per_epoch or math.inf) * run.accumulate,
    "estimated_stepping_batches": _count_steps,
}
_OF_STATE: dict[str, Callable[[Any], Any]] = {
    "should_stop": lambda state: bool(state.stop_reason),
    "default_root_dir": lambda state: str(state.folder),
    "log_dir": lambda state: str(state.folder),
}


class TrainerView:
    """One run, for the module and data module of one Task. Lightning's documentation of Trainer has the attributes.

    current_epoch:  the epoch that has begun, until its end has been handled
    training_state: None before the first step
    strategy:       an `own_steps.Strategy`
    """

    training = validating = sanity_checking = testing = predicting = fast_dev_run = False
    checkpoint_callback = early_stopping_callback = progress_bar_callback = gradient_clip_algorithm = None
    node_rank = 0
    val_check_interval = 1.0
    check_val_every_n_epoch = 1
    state = SimpleNamespace(fn="fit")

    run: RunFacts | None = None
    training_state: TrainingState | None = None
    strategy: Any = None
    precision_plugin: Any = None
    logger: RunLogger | None = None
    lightning_module: Any = None
    datamodule: Any = None
    train_dataloader: Any = None
    val_dataloaders: Any = None
    current_epoch = 0

    def __init__(self) -> None:
        self.callback_metrics: dict[str, Any] = {}
        self.lr_scheduler_configs: list[Any] = []
        self.callbacks: list[Any] = []
        self.optimizers: list[Any] = []

    @property
    def world_size(self) -> int:
        if self.run is not None:
            return self.run.num_ranks
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def global_rank(self) -> int:
        if self.run is not None:
            return self.run.rank
        return dist.get_rank() if dist.is_initialized() else 0

    num_devices, local_rank = world_size, global_rank

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def global_step(self) -> int:
        if self.lightning_module is not None and not self.lightning_module.automatic_optimization:
            steps: int = self.strategy.num_steps
            return steps
        return 0 if self.training_state is None else self.training_state.step

    @property
    def logged_metrics(self) -> dict[str, Any]:
        return self.callback_metrics

    progress_bar_metrics = logged_metrics

    def update_metrics(self, values: Mapping[str, Any]) -> None:
        """Of `callback_metrics`, which are tensors."""
        self.callback_metrics |= {name: torch.as_tensor(each, dtype=torch.float32) for name, each in values.items()}

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "should_stop":
            super().__setattr__(name, value)
        elif value and self.training_state is not None:
            self.training_state.request_stop("the module has set trainer.should_stop")

    def __getattr__(self, name: str) -> Any:
        for table, known, since in (
            (_OF_RUN, self.run, "the module's setup"),
            (_OF_STATE, self.training_state, "on_fit_start"),
        ):
            if name in table:
                if known is None:
                    raise ConfigError(f"self.trainer.{name}", None, f"is known from {since} on")
                return table[name](known)
        remedy = "docs/libs/lightning.md has what there is; a Task's own methods and the spec have the rest"
        raise _make_error("self.trainer", name, remedy)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[[], Self], tuple[()]]:
        return type(self), ()


def _make_error(owner: str, name: str, remedy: str) -> AttributeError:
    if name.startswith("__"):
        return AttributeError(name)
    return TrainerAttributeError(f"{owner}.{name}", None, "is not there in a run of Shoal", remedy)
