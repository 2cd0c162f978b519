"""Calls a Task's callbacks, and shows them the run. Called by the Trainer, on every rank at the same step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from shoal.errors import ConfigError
from shoal.train.callback import Callback, TrainingState
from shoal.train.loop.components import TrainComponents


class CallbackRunner:
    """The callbacks of one rank. folder: of the run; log: into the record, with a step"""

    def __init__(
        self,
        callbacks: Sequence[object],
        parts: TrainComponents,
        is_first: bool,
        folder: Path,
        log: Callable[[int, Mapping[str, float]], None],
    ) -> None:
        self._callbacks, self._parts = [_require_callback(each) for each in callbacks], parts
        self._state = TrainingState(parts.model.modules, parts.optimizer, is_first, folder, _log=log)

    @property
    def stop_reason(self) -> str:
        """Why a callback of this rank wants the run to end; "": none does."""
        return self._state.stop_reason

    def begin(self, step: int, metrics: Mapping[str, float]) -> None:
        self._state.metrics = metrics
        self._call(Callback.on_begin, step)

    def end_step(self, step: int, loss: Tensor) -> None:
        self._state.loss = loss
        self._call(Callback.on_step, step)

    def end_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._state.metrics = metrics
        self._call(Callback.on_evaluation, step)

    def end(self, step: int) -> None:
        self._call(Callback.on_end, step)

    def _call(self, method: Callable[[Callback, TrainingState], None], step: int) -> None:
        if not self._callbacks:
            return
        self._state.step, self._state.epoch = step, self._parts.epoch
        for each in self._callbacks:
            getattr(each, method.__name__)(self._state)


def _require_callback(found: object) -> Callback:
    if not isinstance(found, Callback):
        problem = "is no callback"
        raise ConfigError("Task.callbacks", type(found).__name__, problem, "subclass shoal.train.Callback")
    return found
