"""The order of Lightning's events in a run of Shoal: hooks, logs, schedules and the ends of epochs.

Called by `LightningTask`, for each step and evaluation, and by the Trainer as a callback. Imports nothing of Lightning.
"""

from __future__ import annotations

import base64
import inspect
import io
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.batch_tree import count_samples
from shoal.errors import ConfigError
from shoal.extend.parallel import Loss
from shoal.extend.train import Callback, TrainingState
from shoal.libs.lightning.hooks import is_overridden
from shoal.libs.lightning.logs import Logs, average_over_ranks
from shoal.libs.lightning.own_steps import Strategy
from shoal.libs.lightning.trainer_view import RunLogger, TrainerView


class LightningEvents(Callback):
    """Of one module, on one rank.

    takes_own_steps: whether the module does, rather than returning losses
    """

    def __init__(self, view: TrainerView) -> None:
        self.view, self.takes_own_steps = view, False
        view.strategy = view.precision_plugin = Strategy(view, self.call)
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
        """Those of the module, whose schedules are noted. Raises Lightning's own errors for what it does not take."""
        self.view.strategy.configure(self.module.configure_optimizers())
        return self.view.optimizers

    def read(self, name: str, *args: Any) -> dict[str, Tensor]:
        """Call a hook of the callbacks and of the module, and return what it logs."""
        hooks = [partial(getattr(each, name), self.view, self.module) for each in self.view.callbacks]
        if is_overridden(self.module, name):  # in order; but an early stopping reads what the module logs there
            hooks.insert(0 if name == "on_train_epoch_end" else len(hooks), getattr(self.module, name))
        if not hooks:
            return {}
        logs = Logs(is_training=False)
        with logs.receive(self.module, 0) as logged:
            for hook in hooks:
                answer = hook(*args)
                if name == "on_train_batch_start" and answer == -1:
                    problem = f"{name} of {type(self.module).__name__} gave -1, and a run ends no epoch early"
                    raise ConfigError("task", name, problem, "give the train_dataloader a sampler of fewer samples")
                self.view.update_metrics(logged)
        logged |= {key: torch.tensor(value) for key, value in logs.compute(1).items()}
        logs.reset()
        return logged

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
                return {"loss": self._require_loss(_call_step(model, "training_step", batch, 0))}
        batch = self._begin_batch(batch)
        returned, logged = self._compute(batch)
        loss = self._require_loss(returned)
        self.call("on_before_backward", loss)
        return logged | {"loss": loss}

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

    def _compute(self, batch: Any) -> tuple[Any, dict[str, Tensor]]:
        """What `training_step` gives, and what it logs."""
        with self._training.receive(self.module, count_samples(batch)) as logged:
            returned = _call_step(self.module, "training_step", batch, self._batch_index)
        self.view.update_metrics(logged)
        outputs = dict(returned) if isinstance(returned, Mapping) else {} if returned is None else {"loss": returned}
        if "loss" in outputs:
            outputs["loss"] = torch.as_tensor(outputs["loss"]).detach()
        self._newest = (outputs, batch, self._batch_index)
        return returned, logged

    def _take_own_step(self, batch: Any) -> Iterator[tuple[str, Tensor]]:
        module = self.module
        strategy = self.view.strategy
        logged = dict[str, Tensor]()
        batch, index = self._begin_batch(batch), self._batch_index

        def compute() -> Tensor:
            returned, of_batch = self._compute(batch)
            logged.update(of_batch)
            [optimizer] = self.view.optimizers
            self.call("on_before_zero_grad", optimizer)
            module.optimizer_zero_grad(self.view.current_epoch, index, optimizer)
            loss = self._require_loss(returned)
            strategy.backward(loss)
            return loss.detach()

        strategy.loss = torch.zeros(())
        strategy.exchange_gradients()
        if module.automatic_optimization:
            module.optimizer_step(self.view.current_epoch, index, module.optimizers(), compute)
        else:
            _, logged = self._compute(batch)
        strategy.exchange_gradients()
        yield from {**logged, "loss": strategy.loss}.items()

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
        values: dict[str, Loss] = {**self.read("on_validation_batch_start", batch, index)}
        with logs.receive(model, count_samples(batch)) as logged:
            returned = _call_step(model, "validation_step", batch, index)
        values |= {"val_loss": returned} if isinstance(returned, Tensor) else {}
        self._validation_index += 1
        return {**values, **logged, **self.read("on_validation_batch_end", returned, batch, index)}

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

    def _require_loss(self, returned: Any) -> Tensor:
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if not isinstance(loss, Tensor):
            problem = f"training_step gave a {type(returned).__name__}"
            raise ConfigError("task", type(self.module).__name__, problem, "return the loss, or a dict with 'loss'")
        return loss

    def _transfer(self, batch: Any) -> Any:
        for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
            for owner in (self.view.datamodule, self.module):
                if is_overridden(owner, name):
                    device = [self.module.device] if name.startswith("transfer") else []
                    batch = getattr(owner, name)(batch, *device, 0)
                    break  # the module's is not called then, as by Lightning
        return batch

    def _finish_batch(self) -> None:
        newest, self._newest = self._newest, ()
        self._batch_index += 1
        self.call("on_train_batch_end", *newest)

    # -- schedules and epochs

    def _advance(self, interval: str, count: int, *, follows_metric: bool) -> None:
        """Take the steps of schedules that are due.

        count: finished batches of the epoch, or finished epochs of the run, by the interval: as Lightning counts them
        """
        metrics = self.view.callback_metrics
        for each in self.view.lr_scheduler_configs if self.module.automatic_optimization else ():
            if (each.interval, each.reduce_on_plateau) != (interval, follows_metric) or count % each.frequency:
                continue
            metric = metrics.get(each.monitor) if follows_metric else None
            if metric is not None or not follows_metric:
                self.module.lr_scheduler_step(each.scheduler, metric)
            elif each.strict:
                problem = f"{type(each.scheduler).__name__} follows it, and it is not there"
                known = f"there is {', '.join(sorted(metrics)) or 'none yet: evaluate or log it'}"
                raise ConfigError("lr_scheduler.monitor", each.monitor, problem, known)

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
        if not view.optimizers:
            view.strategy.configure(state.optimizer)
        view.training, self._epoch = True, int(state.epoch + 1e-9)
        self.call("on_fit_start")
        if before:
            self._load(before)
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

    @property
    def _stateful(self) -> dict[str, Any]:
        """What a checkpoint of Lightning's holds beside the weights and the optimizers."""
        view = self.view
        found = {each.state_key: each for each in view.callbacks}
        found |= {str(index): each.scheduler for index, each in enumerate(view.lr_scheduler_configs)}
        return found | ({"data": view.datamodule} if is_overridden(view.datamodule, "state_dict") else {})

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
            "batch_index": self._batch_index,
            "sums": self._training.sums,
            "steps": view.strategy.num_steps,
            "parts": {name: each.state_dict() for name, each in self._stateful.items()},
        }
        file = io.BytesIO()
        torch.save(state, file)
        return {"state": base64.b64encode(file.getvalue()).decode()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = torch.load(io.BytesIO(base64.b64decode(state["state"])), "cpu", weights_only=True)

    def _load(self, state: dict[str, Any]) -> None:
        view = self.view
        view.current_epoch, view.strategy.num_steps = state["checkpoint"]["epoch"], state["steps"]
        view.callback_metrics = state["metrics"]
        self._training.sums, self._batch_index = state["sums"], state["batch_index"]
        for name, each in self._stateful.items():
            if saved := state["parts"].get(name):
                each.load_state_dict(saved)
        self.read("on_load_checkpoint", state["checkpoint"])


def _call_step(module: Any, name: str, batch: Any, index: int) -> Any:
    step = getattr(module, name)
    return step(batch, index) if len(inspect.signature(step).parameters) > 1 else step(batch)
