"""The order of Lightning's events in a run of Shoal: hooks, logs, schedules and the ends of epochs.

Called by `LightningTask`, for each step and evaluation, and by the Trainer as a callback. Imports nothing of Lightning.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shoal.batch_tree import count_samples
from shoal.errors import ConfigError
from shoal.extend.train import Callback, TrainingState
from shoal.libs.lightning.logs import Logs, average_over_ranks
from shoal.libs.lightning.schedule import Schedule
from shoal.libs.lightning.trainer_view import RunLogger, TrainerView

# Overridden, these change what a step does; a run has its own.
_REFUSED = {
    "optimizer_step": "a schedule with interval=step, and on_before_optimizer_step, are called",
    "backward": "return the loss from training_step",
    "configure_gradient_clipping": "say clip_norm=1.0",
    "transfer_batch_to_device": "on_after_batch_transfer is called",
}


def is_overridden(owner: object, name: str) -> bool:
    """Whether it has a method of its own of this name, and not Lightning's."""
    method = getattr(owner, name, None)
    return method is not None and not str(method.__module__).startswith(("pytorch_lightning.", "lightning."))


def check_module(module: Any) -> None:
    """Raises ConfigError for what a run would do otherwise than the module says."""
    name = type(module).__name__
    if not getattr(module, "automatic_optimization", True):
        remedy = "write a Task with `optimizers` and a `train_step` that yields"
        raise ConfigError("automatic_optimization", False, f"{name} takes the steps of its optimizers itself", remedy)
    for hook, remedy in _REFUSED.items():
        if is_overridden(module, hook):
            raise ConfigError("task", name, f"has a {hook} of its own, which is not called", remedy)


class LightningEvents(Callback):
    """Of one module, on one rank."""

    def __init__(self, view: TrainerView) -> None:
        self.view, self.schedule = view, None
        self._training, self._validation = Logs(is_training=True), Logs(is_training=False)
        self._batch_index = self._validation_index = 0
        self._is_within_epoch = False
        self._epoch = 0  # finished ones, whether or not their end has been handled
        self._last: tuple[Any, ...] = ()  # outputs, batch and its index of the newest step
        self._restored: dict[str, Any] = {}

    schedule: Schedule | None

    @property
    def module(self) -> Any:
        return self.view.lightning_module

    def _call(self, name: str, *args: Any) -> dict[str, Tensor]:
        """Call a hook of the module, and return what it logs."""
        if not is_overridden(self.module, name):
            return {}
        logs = Logs(is_training=False)
        with logs.receive(self.module, 1) as logged:
            getattr(self.module, name)(*args)
        return {**logged, **{key: Tensor([value])[0] for key, value in logs.finish_epoch(1).items()}}

    # -- steps

    def train_step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The loss, and what is logged of this batch."""
        if not model.training:  # the check of a run that splits its batches
            with Logs(is_training=True).receive(model, count_samples(batch)):
                return {"loss": self._require_loss(_call_step(model, "training_step", batch, 0))}
        self._finish_epochs()
        if not self._is_within_epoch:
            self._is_within_epoch = True
            self._record(self._call("on_train_epoch_start"))
        batch = self._transfer(batch)
        self._call("on_train_batch_start", batch, self._batch_index)
        with self._training.receive(model, count_samples(batch)) as logged:
            returned = _call_step(model, "training_step", batch, self._batch_index)
        loss = self._require_loss(returned)
        self._call("on_before_zero_grad", *self.view.optimizers)
        self._call("on_before_backward", loss)
        if is_overridden(self.module, "on_train_batch_end"):
            self._last = (returned, batch, self._batch_index)
        self._batch_index += 1
        self.view.callback_metrics |= logged
        return {"loss": loss, **{name: value for name, value in logged.items() if name != "loss"}}

    def eval_step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """What `validation_step` logs; a returned tensor is `val_loss`."""
        if not is_overridden(model, "validation_step"):
            return {}
        if not self.view.validating:
            self.view.validating, self._validation_index = True, 0
            self._call("on_validation_start")
            self._call("on_validation_epoch_start")
        batch, index = self._transfer(batch), self._validation_index
        is_filler = model is not self.module  # a copy, of which nothing counts
        logs = Logs(is_training=False) if is_filler else self._validation
        self._call("on_validation_batch_start", batch, index)
        with logs.receive(model, count_samples(batch)) as logged:
            returned = _call_step(model, "validation_step", batch, index)
        self._call("on_validation_batch_end", returned, batch, index)
        self._validation_index += 1
        return {"val_loss": returned, **logged} if isinstance(returned, Tensor) else dict(logged)

    def finish_evaluation(self) -> dict[str, float]:
        """The metrics that count over the samples of an evaluation, and what its last hooks log. Collective."""
        if not self.view.validating:
            return {}
        num_ranks = self.view.world_size
        logged = self._call("on_validation_epoch_end")
        metrics = self._validation.finish_epoch(num_ranks)
        logged |= self._call("on_validation_end")
        self.view.validating = False
        return metrics | average_over_ranks({name: (float(each), 1.0) for name, each in logged.items()}, num_ranks)

    def _require_loss(self, returned: Any) -> Tensor:
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if not isinstance(loss, Tensor):
            problem = f"training_step gave a {type(returned).__name__}"
            raise ConfigError("task", type(self.module).__name__, problem, "return the loss, or a dict with 'loss'")
        return loss

    def _transfer(self, batch: Any) -> Any:
        for name in ("on_before_batch_transfer", "on_after_batch_transfer"):
            for owner in (self.module, self.view.datamodule):
                if is_overridden(owner, name):
                    batch = getattr(owner, name)(batch, 0)
        return batch

    def take_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if is_overridden(self.module, "lr_scheduler_step"):
            self.module.lr_scheduler_step(scheduler, metric)
        else:
            scheduler.step(*(() if metric is None else (metric,)))

    # -- epochs

    def _finish_epochs(self) -> None:
        """Handle the ends of the epochs that are over: after their evaluation, or before the next step."""
        view = self.view
        while view.current_epoch < self._epoch:
            self._record(self._call("on_train_epoch_end"))
            logged = self._training.finish_epoch(view.world_size)
            self._record(logged)
            view.callback_metrics |= {name.removesuffix("_epoch"): value for name, value in logged.items()}
            self._advance(view.current_epoch + 1, follows_metric=True)
            view.current_epoch += 1
            self._batch_index, self._is_within_epoch = 0, False

    def _advance(self, epoch: int, *, follows_metric: bool) -> None:
        if self.schedule is not None and self.schedule.reduce_on_plateau == follows_metric:
            metrics = self.view.callback_metrics
            self.schedule.advance(self.view.global_step, epoch, metrics, self.take_scheduler_step)

    def _record(self, logged: Mapping[str, Any]) -> None:
        if logged and self.view.state is not None:
            values = {name: float(value) for name, value in logged.items()}
            self.view.callback_metrics |= values
            self.view.state.log({f"train/{name}": value for name, value in values.items()})

    # -- the Trainer's callback

    def on_begin(self, state: TrainingState) -> None:
        view = self.view
        view.state, view.logger, view.optimizers = state, RunLogger(state), [state.optimizer]
        view.training, self._epoch = True, int(state.epoch + 1e-9)
        view.current_epoch = self._restored.get("epoch", self._epoch)
        view.callback_metrics |= self._restored.get("metrics", {}) | state.metrics
        self._training.load_state_dict(self._restored.get("sums", {}))
        if self.schedule is not None:
            view.lr_scheduler_configs = [self.schedule]
            self.schedule.begin(state.step, self._epoch, self.take_scheduler_step)
            self.schedule.load_state_dict(self._restored.get("schedule", {}))
        if view.current_epoch == self._epoch and view.run is not None and view.run.steps_per_epoch:
            self._batch_index = round((state.epoch - self._epoch) * view.num_training_batches)
        state.optimizer.register_step_pre_hook(self._before_optimizer_step)
        self._call("on_fit_start")
        self._call("on_train_start")

    def _before_optimizer_step(self, optimizer: Any, *_: Any) -> None:
        self._call("on_after_backward")
        self._call("on_before_optimizer_step", optimizer)

    def on_step(self, state: TrainingState) -> None:
        self._epoch = int(state.epoch + 1e-9)
        self._advance(self._epoch, follows_metric=False)
        if self.schedule is not None and self.schedule.interval == "step":
            self._advance(self._epoch, follows_metric=True)
        if self._last:
            self._call("on_train_batch_end", *self._last)
            self._last = ()

    def on_evaluation(self, state: TrainingState) -> None:
        self.view.callback_metrics |= state.metrics
        self._epoch = int(state.epoch + 1e-9)
        self._finish_epochs()

    def on_end(self, state: TrainingState) -> None:
        self._finish_epochs()
        self._call("on_train_end")
        self._call("on_fit_end")
        self.view.training = False
        for owner in (self.module, self.view.datamodule):
            if is_overridden(owner, "teardown"):
                owner.teardown("fit")

    def state_dict(self) -> dict[str, Any]:
        view = self.view
        metrics = {name: float(value) for name, value in view.callback_metrics.items()}
        schedule, sums = {} if self.schedule is None else self.schedule.state_dict(), self._training.state_dict()
        return {"epoch": view.current_epoch, "metrics": metrics, "sums": sums, "schedule": schedule}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = state


def _call_step(module: Any, name: str, batch: Any, index: int) -> Any:
    step = getattr(module, name)
    return step(batch, index) if len(inspect.signature(step).parameters) > 1 else step(batch)
