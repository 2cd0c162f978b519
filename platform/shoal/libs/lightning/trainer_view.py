"""What a LightningModule finds as `self.trainer`: the run as Lightning names it.

Owns the names and their values; `events` keeps them current. Imports nothing of Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch.distributed as dist

from shoal.errors import ConfigError
from shoal.extend.train import RunFacts, TrainingState


class TrainerAttributeError(ConfigError, AttributeError):
    """A module asks its trainer for what this one does not have. `field` is the attribute."""


class RunLogger:
    """`self.logger`: metrics that a module logs itself enter the run's record."""

    name = "shoal"

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self.version, self.save_dir = state.folder.name, str(state.folder)
        self.log_dir = self.root_dir = self.save_dir

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add them to the record, at the present step."""
        self._state.log({name: float(value) for name, value in metrics.items()})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the record has the Task's arguments."""

    def __getattr__(self, name: str) -> Any:
        raise _make_error("self.logger", name, "log numbers with self.log, or pictures as PNG in TrainingState.folder")


class TrainerView:
    """One run, for the module and data module of one Task. Lightning's documentation of Trainer has the attributes.

    current_epoch: the epoch that has begun, until its end has been handled
    state:         None before the first step
    """

    training = validating = sanity_checking = testing = predicting = False
    fast_dev_run = False
    node_rank = 0
    checkpoint_callback = early_stopping_callback = progress_bar_callback = None

    def __init__(self) -> None:
        self.run: RunFacts | None = None
        self.state: TrainingState | None = None
        self.logger: RunLogger | None = None
        self.lightning_module: Any = None
        self.datamodule: Any = None
        self.train_dataloader: Any = None
        self.val_dataloaders: Any = None
        self.current_epoch = 0
        self.callback_metrics: dict[str, Any] = {}
        self.lr_scheduler_configs: list[Any] = []
        self.callbacks: list[Any] = []
        self.optimizers: list[Any] = []

    # -- the run

    @property
    def world_size(self) -> int:
        if self.run is not None:
            return self.run.num_ranks
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    num_devices = world_size

    @property
    def global_rank(self) -> int:
        if self.run is not None:
            return self.run.rank
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    local_rank = global_rank

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def max_epochs(self) -> int | float:
        epochs = self._get("max_epochs").spec.stop.epochs
        return -1 if epochs is None else int(epochs) if epochs == int(epochs) else epochs

    @property
    def max_steps(self) -> int:
        return self._get("max_steps").spec.stop.steps or -1

    @property
    def accumulate_grad_batches(self) -> int:
        return self._get("accumulate_grad_batches").spec.parallel.accumulate

    @property
    def gradient_clip_val(self) -> float | None:
        return self._get("gradient_clip_val").spec.clip_norm

    @property
    def precision(self) -> str:
        return self._get("precision").spec.parallel.precision

    @property
    def num_training_batches(self) -> int | float:
        """Of an epoch, for each rank; inf if the data has no length."""
        run = self._get("num_training_batches")
        return float("inf") if run.steps_per_epoch is None else run.steps_per_epoch * self.accumulate_grad_batches

    @property
    def estimated_stepping_batches(self) -> int:
        """Steps of the optimizer in the whole run. Raises ConfigError where nothing tells."""
        total = self._get("estimated_stepping_batches").total_steps
        if total is None:
            problem = "is not known, and the module's configure_optimizers asks for it"
            raise ConfigError("estimated_stepping_batches", None, problem, "give stop.epochs or stop.steps")
        return total

    # -- its progress

    @property
    def global_step(self) -> int:
        return 0 if self.state is None else self.state.step

    @property
    def logged_metrics(self) -> dict[str, Any]:
        return self.callback_metrics

    progress_bar_metrics = logged_metrics

    @property
    def loggers(self) -> list[RunLogger]:
        return [] if self.logger is None else [self.logger]

    @property
    def default_root_dir(self) -> str:
        if self.state is None:
            raise ConfigError("self.trainer.default_root_dir", None, "is known from on_fit_start on")
        return str(self.state.folder)

    log_dir = default_root_dir

    @property
    def model(self) -> Any:
        return self.lightning_module

    @property
    def should_stop(self) -> bool:
        return self.state is not None and bool(self.state.stop_reason)

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value and self.state is not None:
            self.state.request_stop("the module has set trainer.should_stop")

    # -- what there is not

    def _get(self, name: str) -> RunFacts:
        if self.run is None:
            raise ConfigError(
                f"self.trainer.{name}", None, "is known once the data is there: from the module's setup on"
            )
        return self.run

    def __getattr__(self, name: str) -> Any:
        remedy = "docs/training.md lists what there is; a Task's own methods and the spec have the rest"
        raise _make_error("self.trainer", name, remedy)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[[], Self], tuple[()]]:
        return type(self), ()


def _make_error(owner: str, name: str, remedy: str) -> AttributeError:
    if name.startswith("__"):
        return AttributeError(name)
    return TrainerAttributeError(f"{owner}.{name}", None, "is not there in a run of Shoal", remedy)
