"""Callbacks: a Task's code that runs as training goes on, without a loop of its own.

Owns what a callback sees and may do. The Trainer calls a `CallbackRunner`, on every rank at the same step. Most Tasks
need none: evaluations, checkpoints, schedules and stopping criteria are fields of the spec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import ConfigError


@dataclass
class TrainingState:
    """A run as a callback sees it.

    model:     this rank's modules: the full model, or its part of it
    step:      finished steps of the run
    epoch:     finished epochs, with a fraction
    loss:      the newest step's mean loss over this rank's samples, detached; None before the first
    metrics:   of the newest evaluation, over all ranks
    is_first:  whether this rank writes the record
    folder:    of the run; PNG files in its folder `pictures` are shown in the report
    should_stop: whether a signal has asked the run to end, for what takes long
    """

    model: Sequence[nn.Module]
    optimizer: Optimizer
    is_first: bool
    folder: Path
    should_stop: Callable[[], bool] = lambda: False
    _log: Callable[[int, Mapping[str, float]], None] = lambda step, values: None
    step: int = 0
    epoch: float = 0.0
    loss: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    stop_reason: str = ""

    def log(self, values: Mapping[str, float]) -> None:
        """Add metrics to the run's record, at the present step. Does nothing on other ranks than the first."""
        self._log(self.step, values)

    def request_stop(self, reason: str) -> None:
        """End the run, on all ranks, once they have exchanged this: within half a second, and at the end of an epoch
        or an evaluation at once. It counts as finished."""
        self.stop_reason = self.stop_reason or reason


class Callback:
    """Subclass it, and return it from `Task.callbacks`. Every method does nothing by default."""

    def on_begin(self, state: TrainingState) -> None:
        """Before the first step of this attempt: weights and step of a resumed run are restored."""

    def on_gradients(self, state: TrainingState) -> None:
        """Before each step of the optimizer: the gradients are those of all ranks, and not clipped yet. Where a step
        has several optimizers, after theirs."""

    def on_step(self, state: TrainingState) -> None:
        """After each step. Reading `state.loss` waits for the device."""

    def on_evaluation(self, state: TrainingState) -> None:
        """After each evaluation."""

    def on_epoch_end(self, state: TrainingState) -> None:
        """After the last step of an epoch, and the evaluation that follows it."""

    def on_end(self, state: TrainingState) -> None:
        """After the last step and evaluation; not when an error or an interruption ends the run."""

    def state_dict(self) -> dict[str, Any]:
        """What checkpoints hold of it, as JSON: that of the first rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called before `on_begin` of a resumed run, if there is any state."""


class CallbackRunner:
    """The callbacks of one rank, and the run as they see it. Raises ConfigError for an object that is no Callback."""

    def __init__(self, callbacks: Sequence[object], state: TrainingState, get_epoch: Callable[[], float]) -> None:
        self.callbacks: list[Callback] = []
        for each in callbacks:
            if not isinstance(each, Callback):
                problem = "is no callback"
                raise ConfigError("Task.callbacks", type(each).__name__, problem, "subclass shoal.train.Callback")
            self.callbacks.append(each)
        self._state, self._get_epoch = state, get_epoch

    @property
    def stop_reason(self) -> str:
        """Why a callback of this rank wants the run to end; "": none does."""
        return self._state.stop_reason

    def state_dict(self) -> list[dict[str, Any]]:
        """Of each callback, in order."""
        return [each.state_dict() for each in self.callbacks]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Give each its state, as long as there are as many as before."""
        for each, state in zip(self.callbacks, states, strict=False):
            if state:
                each.load_state_dict(state)

    def end_step(self, step: int, loss: Tensor) -> None:
        self._state.loss = loss
        self.call(Callback.on_step, step)

    def call(
        self,
        method: Callable[[Callback, TrainingState], None],
        step: int,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Call this method of each. metrics: of the newest evaluation, if they are others"""
        if metrics is not None:
            self._state.metrics = metrics
        if self.callbacks:
            self._state.step, self._state.epoch = step, self._get_epoch()
            for each in self.callbacks:
                getattr(each, method.__name__)(self._state)
