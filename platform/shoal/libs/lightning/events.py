"""The order of Lightning's events in a run of Shoal: hooks, logs, schedules and the ends of epochs.

Called by `LightningTask`, for each step and evaluation, and by the Trainer as a callback. Imports nothing of Lightning.
"""

from __future__ import annotations

import base64
import inspect
import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.batch_tree import count_samples
from shoal.errors import ConfigError
from shoal.extend.parallel import Loss, Mean
from shoal.extend.train import Callback, TrainingState
from shoal.libs.lightning.hooks import is_overridden
from shoal.libs.lightning.logs import Logs, average_over_ranks
from shoal.libs.lightning.own_steps import Strategy
from shoal.libs.lightning.schedule import read_optimizers
from shoal.libs.lightning.trainer_view import RunLogger, TrainerView


class LightningEvents(Callback):
    """Of one module, on one rank.

    takes_own_steps: whether the module does, rather than returning losses
    """

    def __init__(self, view: TrainerView) -> None:
        self.view, self.takes_own_steps = view, False
        view.strategy = Strategy(view, self.call)
        self._training, self._validation = Logs(is_training=True), Logs(is_training=False)
        self._batch_index = self._validation_index = 0
        self._is_within_epoch = False
        self._epoch = 0  # finished ones, whether or not their end has been handled
        self._newest: tuple[Any, ...] = ()  # outputs, batch and its index of a batch whose end has not been handled
        self._restored: dict[str, Any] = {}
        self._last_state: dict[str, Any] = {}  # of a run that has ended, before the module has heard of it

    @property
    def module(self) -> Any:
        return self.view.lightning_module

    def configure_optimizers(self) -> list[Optimizer]:
        """Those of the module, whose schedules are noted. Raises ConfigError for a schedule without its metric."""
        view = self.view
        view.optimizers, view.lr_scheduler_configs = read_optimizers(self.module.configure_optimizers())
        for each in view.lr_scheduler_configs if self.module.automatic_optimization else ():
            if each.reduce_on_plateau and each.monitor is None:
                problem = f"{type(each.scheduler).__name__} follows a metric, and none is named"
                remedy = 'give {"scheduler": ..., "monitor": "val_loss"}'
                raise ConfigError("lr_scheduler.monitor", None, problem, remedy)
        view.strategy.wrap(view.optimizers)
        return view.optimizers

    def read(self, name: str, *args: Any) -> dict[str, Tensor]:
        """Call a hook of the callbacks and of the module, and return what it logs."""
        hooks: list[tuple[Any, tuple[Any, ...]]] = [
            (each, (self.view, self.module)) for each in self.view.callbacks if hasattr(each, name)
        ]
        if is_overridden(self.module, name):
            is_monitored = name == "on_train_epoch_end"  # an early stopping reads what the module logs there
            hooks.insert(0 if is_monitored else len(hooks), (self.module, ()))
        if not hooks:
            return {}
        logs = Logs(is_training=False)
        with logs.receive(self.module, 1) as logged:
            for owner, first in hooks:
                if getattr(owner, name)(*first, *args) == -1 and owner is self.module:
                    problem = f"{name} of {type(owner).__name__} gave -1, and a run ends no epoch early"
                    raise ConfigError("task", name, problem, "give the train_dataloader a sampler of fewer samples")
                self.view.update_metrics(logged)
        computed = {key: torch.tensor(value) for key, value in logs.compute(1).items()}
        return {**logged, **computed}

    def call(self, name: str, *args: Any) -> None:
        """Call a hook in training: what it logs enters the record."""
        self._record(self.read(name, *args))

    # -- steps

    def train_step(self, model: nn.Module, batch: Any) -> Any:
        """The loss, and what is logged of this batch; or a step that the module takes itself."""
        if self.takes_own_steps:
            return self._take_own_step(batch)
        if not model.training:  # the check of a run that splits its batches
            with Logs(is_training=True).receive(model, count_samples(batch)):
                return {"loss": self._require_loss(_call_step(model, "training_step", batch, 0))[0]}
        batch = self._begin_batch(batch)
        loss, logged = self._compute_loss(batch)
        self.call("on_before_backward", loss)
        return {"loss": loss, **logged}

    def _begin_batch(self, batch: Any) -> Any:
        self._finish_epochs()
        if self._newest:  # a micro-batch
            self.call("on_after_backward")
            self._finish_batch()
        if not self._is_within_epoch:
            self._is_within_epoch = True
            self.call("on_train_epoch_start")
        batch = self._transfer(batch)
        self.call("on_train_batch_start", batch, self._batch_index)
        return batch

    def _compute_loss(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, and what is logged of it."""
        module = self.module
        with self._training.receive(module, count_samples(batch)) as logged:
            returned = _call_step(module, "training_step", batch, self._batch_index)
        self.view.update_metrics(logged)
        if module.automatic_optimization:
            loss, outputs = self._require_loss(returned)
        else:
            losses = self.view.strategy.losses
            loss = torch.stack(losses).sum() if losses else torch.zeros((), device=module.device)
            outputs = {} if returned is None else _get_outputs(returned)
        self._newest = (outputs, batch, self._batch_index)
        return loss, {name: value for name, value in logged.items() if name != "loss"}

    def _take_own_step(self, batch: Any) -> Iterator[tuple[str, Tensor]]:
        view, module = self.view, self.module
        strategy, logged = view.strategy, dict[str, Tensor]()
        if not view.optimizers:
            problem = f"{type(module).__name__} takes its steps itself, with optimizers that only a run has"
            raise ConfigError("automatic_optimization", module.automatic_optimization, problem, "train it")
        batch = self._begin_batch(batch)
        strategy.losses = []
        strategy.exchange_gradients()
        if module.automatic_optimization:

            def compute() -> Tensor:
                loss, of_batch = self._compute_loss(batch)
                logged.update(of_batch)
                self.call("on_before_zero_grad", view.optimizers[0])
                module.optimizer_zero_grad(view.current_epoch, self._batch_index, view.optimizers[0])
                strategy.backward(loss)
                return loss.detach()

            module.optimizer_step(view.current_epoch, self._batch_index, module.optimizers(), compute)
            loss = strategy.losses[-1]
        else:
            loss, logged = self._compute_loss(batch)
        strategy.exchange_gradients()
        yield "loss", loss.detach()
        yield from logged.items()

    def eval_step(self, model: nn.Module, batch: Any) -> dict[str, Loss]:
        """What `validation_step` logs; a returned tensor is `val_loss`."""
        if not is_overridden(model, "validation_step"):
            return {}
        if not self.view.validating:
            self.view.validating, self._validation_index = True, 0
            self.view.strategy.gradients = []  # as Lightning does
            self.call("on_validation_start")
            self.call("on_validation_epoch_start")
        batch, index = self._transfer(batch), self._validation_index
        is_filler = model is not self.module  # a copy, of which nothing counts
        logs = Logs(is_training=False) if is_filler else self._validation
        values = self.read("on_validation_batch_start", batch, index)
        with logs.receive(model, count_samples(batch)) as logged:
            returned = _call_step(model, "validation_step", batch, index)
        values |= {**logged, **self.read("on_validation_batch_end", returned, batch, index)}
        self._validation_index += 1
        means = {name: Mean(values[name] * size, size) for name, size in logs.sizes.items()}
        return {**({"val_loss": returned} if isinstance(returned, Tensor) else {}), **values, **means}

    def finish_evaluation(self) -> dict[str, float]:
        """The metrics that count over the samples of an evaluation, and what its last hooks log. Collective."""
        if not self.view.validating:
            return {}
        num_ranks = self.view.world_size
        logged = self.read("on_validation_epoch_end")
        metrics = self._validation.compute(num_ranks)
        self._validation.reset()
        self.view.update_metrics(metrics)
        logged |= self.read("on_validation_end")
        self.view.validating = False
        return metrics | average_over_ranks({name: (float(each), 1.0) for name, each in logged.items()}, num_ranks)

    def _require_loss(self, returned: Any) -> tuple[Tensor, dict[str, Any]]:
        """The loss, and the outputs as on_train_batch_end gets them."""
        outputs = _get_outputs(returned)
        loss = outputs.get("loss")
        if not isinstance(loss, Tensor):
            problem = f"training_step gave a {type(returned).__name__}"
            raise ConfigError("task", type(self.module).__name__, problem, "return the loss, or a dict with 'loss'")
        return loss, {**outputs, "loss": loss.detach()}

    def _transfer(self, batch: Any) -> Any:
        device = (self.module.device,)
        for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
            owner = next((each for each in self._owners if is_overridden(each, name)), None)
            if owner is not None:
                batch = getattr(owner, name)(batch, *(device if name == "transfer_batch_to_device" else ()), 0)
        return batch

    @property
    def _owners(self) -> tuple[Any, Any]:
        """Of the hooks about data: a data module's go before the module's."""
        return self.view.datamodule, self.module

    def _finish_batch(self) -> None:
        newest, self._newest = self._newest, ()
        self._batch_index += 1
        self.call("on_train_batch_end", *newest)

    # -- schedules and epochs

    def _advance(self, interval: str, count: int, *, follows_metric: bool) -> None:
        for each in self.view.lr_scheduler_configs if self.module.automatic_optimization else ():
            if each.interval == interval and each.reduce_on_plateau == follows_metric:
                each.advance(count, self.view.callback_metrics, self._take_scheduler_step)

    def _take_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.module.lr_scheduler_step(scheduler, metric)

    def _end_epoch(self) -> None:
        """What the module hears of the end of an epoch, also of one that is cut short."""
        view = self.view
        logged = self._training.compute(view.world_size)
        view.update_metrics(logged | {name.removesuffix("_epoch"): value for name, value in logged.items()})
        self._record(logged)
        self.call("on_train_epoch_end")

    def _finish_epochs(self) -> None:
        """Handle the ends of the epochs that are over."""
        view = self.view
        while view.current_epoch < self._epoch:
            self._end_epoch()
            self._training.reset()
            self._advance("epoch", view.current_epoch + 1, follows_metric=True)
            view.current_epoch += 1
            self._batch_index, self._is_within_epoch = 0, False

    def _record(self, logged: Mapping[str, Any]) -> None:
        if logged and self.view.training_state is not None:
            self.view.training_state.log({f"train/{name}": float(value) for name, value in logged.items()})

    # -- the Trainer's callback

    def on_begin(self, state: TrainingState) -> None:
        view, before = self.view, self._restored
        view.training_state, view.logger = state, RunLogger(state)
        view.optimizers = view.optimizers or [state.optimizer]
        view.strategy.wrap(view.optimizers)
        view.training, self._epoch = True, int(state.epoch + 1e-9)
        view.current_epoch = self._epoch
        view.update_metrics(state.metrics)
        self.call("on_fit_start")
        if before:
            self._load(before)
        if view.current_epoch == self._epoch and view.run is not None and view.run.steps_per_epoch:
            self._batch_index = round((state.epoch - self._epoch) * view.num_training_batches)
        self.call("on_train_start")

    def on_gradients(self, state: TrainingState) -> None:
        if not self.takes_own_steps:
            self.call("on_after_backward")
            self.call("on_before_optimizer_step", *self.view.optimizers)

    def on_step(self, state: TrainingState) -> None:
        self._epoch = int(state.epoch + 1e-9)
        self._advance("step", self._batch_index + 1, follows_metric=False)
        if self._epoch > self.view.current_epoch:
            self._advance("epoch", self.view.current_epoch + 1, follows_metric=False)
        self._finish_batch()
        self._advance("step", self._batch_index, follows_metric=True)

    def on_evaluation(self, state: TrainingState) -> None:
        self.view.update_metrics(state.metrics)

    def on_epoch_end(self, state: TrainingState) -> None:
        self._epoch = int(state.epoch + 1e-9)
        self._finish_epochs()

    def on_end(self, state: TrainingState) -> None:
        self._finish_epochs()
        self._last_state = self.state_dict()
        if self._is_within_epoch:
            self._end_epoch()
        self.call("on_train_end")
        self.call("on_fit_end")
        self.view.training = False
        if is_overridden(self.view.datamodule, "teardown"):
            self.view.datamodule.teardown("fit")
        self.call("teardown", "fit")

    def state_dict(self) -> dict[str, Any]:
        if self._last_state:
            return self._last_state
        view, weights = self.view, self.module.state_dict()
        checkpoint = {"epoch": view.current_epoch, "global_step": view.global_step, "state_dict": weights}
        self.read("on_save_checkpoint", checkpoint)
        if checkpoint["state_dict"] is weights:  # of a callback that swaps them, both are saved
            del checkpoint["state_dict"]
        state = {
            "checkpoint": checkpoint,
            "metrics": view.callback_metrics,
            "sums": self._training.state_dict(),
            "schedules": [each.scheduler.state_dict() for each in view.lr_scheduler_configs],
            "callbacks": {each.state_key: each.state_dict() for each in view.callbacks},
            "datamodule": view.datamodule.state_dict() if is_overridden(view.datamodule, "state_dict") else {},
            "steps": view.strategy.num_steps,
        }
        file = io.BytesIO()
        torch.save(state, file)
        return {"state": base64.b64encode(file.getvalue()).decode()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = torch.load(io.BytesIO(base64.b64decode(state["state"])), "cpu", weights_only=True)

    def _load(self, state: dict[str, Any]) -> None:
        view = self.view
        view.current_epoch, view.strategy.num_steps = state["checkpoint"]["epoch"], state["steps"]
        view.callback_metrics = state["metrics"] | view.callback_metrics
        self._training.load_state_dict(state["sums"])
        for each, saved in zip(view.lr_scheduler_configs, state["schedules"], strict=True):
            each.scheduler.load_state_dict(saved)
        for each in view.callbacks:
            if saved := state["callbacks"].get(each.state_key):
                each.load_state_dict(saved)
        if state["datamodule"]:
            view.datamodule.load_state_dict(state["datamodule"])
        self.read("on_load_checkpoint", state["checkpoint"])


def _get_outputs(returned: Any) -> dict[str, Any]:
    return dict(returned) if isinstance(returned, Mapping) else {"loss": returned}


def _call_step(module: Any, name: str, batch: Any, index: int) -> Any:
    step = getattr(module, name)
    return step(batch, index) if len(inspect.signature(step).parameters) > 1 else step(batch)
