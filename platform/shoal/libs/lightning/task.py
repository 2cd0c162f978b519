"""A LightningModule, with its data, as a Task.

    from shoal.libs.lightning.task import LightningTask

    class Digits(LightningTask):
        def module(self):
            return LitDigits(hidden=64)

        def datamodule(self):
            return DigitsData("digits/")

Then `shoal run train task=digits.py:Digits parallel=ddp workers=2`. The module's `training_step`, `validation_step` and
`configure_optimizers` are called as Lightning's trainer calls them; what they log is in the run's record. Callbacks and
hooks (`on_train_epoch_end`) are not called: the spec has what they are mostly for. Imports nothing of Lightning.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from shoal.errors import ConfigError
from shoal.extend.data import Data
from shoal.extend.train import Callback, Task, TrainingState

Interval = Literal["epoch", "step"]


class LightningTask(Task):
    """Subclass it, and write `module`, and `datamodule` or `data`.

    Loaders give datasets and their collate function; batch size, order and workers are those of the run's spec. The
    model's outputs at an endpoint are those of the module's `forward`. `optimizer=` of the spec counts where
    `configure_optimizers` gives none; a schedule of the module's needs `schedule.name=constant`, the default.

    As with every step of a Task's own, each rank has the full model. Raises ConfigError for several optimizers, and for
    a scheduler that follows a metric.
    """

    _network: Any = None
    _schedule: _Schedule | None = None

    def module(self) -> Any:
        """The LightningModule, with fresh weights."""
        raise NotImplementedError(f"{type(self).__name__}.module")

    def datamodule(self) -> Any:
        """A LightningDataModule; or anything with `train_dataloader`, and perhaps `val_dataloader`."""
        raise NotImplementedError(f"{type(self).__name__}.datamodule")

    def model(self) -> nn.Module:
        network: nn.Module = self.module()
        self._network = network
        return network

    def data(self) -> Data:
        source = self.datamodule()
        for name, args in (("prepare_data", ()), ("setup", ("fit",))):
            getattr(source, name, lambda *_: None)(*args)
        train = _require_loader(source.train_dataloader())
        validation = getattr(source, "val_dataloader", lambda: None)()
        held_out = _require_loader(validation).dataset if validation else None
        return Data(train.dataset, held_out, collate=train.collate_fn)

    def train_step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The loss of `training_step`, and what it logs."""
        values = _Logs()
        returned = values.run(model, "training_step", batch)
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if not isinstance(loss, Tensor):
            problem = f"training_step gave a {type(returned).__name__}"
            raise ConfigError("task", type(self).__name__, problem, "return the loss, or a dict with 'loss'")
        return {"loss": loss, **{name: value for name, value in values.items() if name != "loss"}}

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """What `validation_step` logs; a returned tensor is `val_loss`."""
        values = _Logs()
        returned = values.run(self._network, "validation_step", batch)
        return {"val_loss": returned, **values} if isinstance(returned, Tensor) else dict(values)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer | None:
        optimizer, self._schedule = _read_optimizers(self._network.configure_optimizers(), type(self).__name__)
        return optimizer

    def callbacks(self) -> Sequence[Callback]:
        return [_ScheduleSteps(lambda: self._schedule)]


class _Logs(dict[str, Tensor]):
    """What a step of a module logs. Lightning's own `log` needs its trainer."""

    def run(self, module: Any, name: str, batch: Any) -> Any:
        """Call the module's step `name` with a batch."""

        def log(key: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if hasattr(value, "compute"):  # a metric of torchmetrics: its value for this batch
                metric, value = value, value.compute()
                metric.reset()
            self[key] = torch.as_tensor(value, dtype=torch.float32).detach()

        def log_dict(values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
            for key, value in values.items():
                log(key, value)

        module.log, module.log_dict = log, log_dict
        try:
            step = getattr(module, name)
            takes_index = len(inspect.signature(step).parameters) > 1
            return step(batch, 0) if takes_index else step(batch)
        finally:
            del module.log, module.log_dict


class _Schedule:
    """A scheduler of PyTorch's, and when it takes a step."""

    def __init__(self, scheduler: Any, interval: Interval = "epoch", frequency: int = 1) -> None:
        self._scheduler, self._interval, self._frequency, self._taken = scheduler, interval, frequency, 0
        self._rates = [group["lr"] for group in scheduler.optimizer.param_groups]

    def begin(self, step: int, epoch: float) -> None:
        """Take all steps that a resumed run has had, from the rates of the beginning: a checkpoint restores its own."""
        for group, rate in zip(self._scheduler.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        with warnings.catch_warnings(action="ignore"):  # the optimiser has had its steps in an earlier attempt
            self.advance(step, epoch)

    def advance(self, step: int, epoch: float) -> None:
        """Take the steps that are due after so many steps and epochs of the run."""
        due = (step if self._interval == "step" else int(epoch + 1e-9)) // self._frequency
        for _ in range(due - self._taken):
            self._scheduler.step()
        self._taken = due


class _ScheduleSteps(Callback):
    """Advances the module's schedule, also of a resumed run."""

    def __init__(self, find: Callable[[], _Schedule | None]) -> None:
        self._find = find

    def on_begin(self, state: TrainingState) -> None:
        if (schedule := self._find()) is not None:
            schedule.begin(state.step, state.epoch)

    def on_step(self, state: TrainingState) -> None:
        if (schedule := self._find()) is not None:
            schedule.advance(state.step, state.epoch)


def _read_optimizers(returned: Any, name: str) -> tuple[Optimizer | None, _Schedule | None]:
    """The optimizer and schedule, of any form that `configure_optimizers` may return."""
    remedy = "write a Task with `optimizers` and `train_step`"
    schedules: Any = []
    if isinstance(returned, Mapping):
        schedules = [returned["lr_scheduler"]] if "lr_scheduler" in returned else []
        returned = returned["optimizer"]
    elif isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], list):
        returned, schedules = returned
    if isinstance(returned, (list, tuple)):
        if len(returned) != 1:
            raise ConfigError("task", name, f"configure_optimizers gave {len(returned)} optimizers", remedy)
        returned = returned[0]
    if len(schedules) > 1:
        raise ConfigError("task", name, f"configure_optimizers gave {len(schedules)} schedulers", "chain them in one")
    if not schedules:
        return returned, None
    chosen = schedules[0] if isinstance(schedules[0], Mapping) else {"scheduler": schedules[0]}
    if isinstance(chosen["scheduler"], torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError("task", name, "its scheduler follows a metric", "use one of steps or epochs")
    return returned, _Schedule(chosen["scheduler"], chosen.get("interval", "epoch"), chosen.get("frequency", 1))


def _require_loader(loader: Any) -> DataLoader[Any]:
    if isinstance(loader, (list, tuple)) and len(loader) == 1:
        loader = loader[0]
    if not isinstance(loader, DataLoader):
        problem = f"gives a {type(loader).__name__}"
        raise ConfigError("datamodule", type(loader).__name__, problem, "give a torch DataLoader, or write Task.data()")
    return loader
