"""The optimizer and the schedules of `configure_optimizers`, in all forms that Lightning takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from shoal.errors import ConfigError


class Schedule:
    """A scheduler of PyTorch's, and when it takes a step.

    scheduler: and interval, frequency, monitor and strict, as in Lightning's `lr_scheduler`
    """

    def __init__(
        self,
        scheduler: Any,
        interval: str = "epoch",
        frequency: int = 1,
        monitor: str | None = None,
        strict: bool = True,
        **others: Any,
    ) -> None:
        self.scheduler, self.interval, self.frequency = scheduler, interval, frequency
        self.monitor, self._strict, self._taken = monitor, strict, 0
        self.reduce_on_plateau = bool(others.get("reduce_on_plateau")) or isinstance(scheduler, ReduceLROnPlateau)
        self._rates = [group["lr"] for group in scheduler.optimizer.param_groups]

    def begin(self, step: int, epoch: int, take: Callable[[Any, Any], None]) -> None:
        """Take all steps that a resumed run has had, from the rates of the beginning: a checkpoint restores its own.

        One that follows a metric has its state from the checkpoint.
        """
        if self.reduce_on_plateau:
            return
        for group, rate in zip(self.scheduler.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        with warnings.catch_warnings(action="ignore"):  # the optimiser has had its steps in an earlier attempt
            self.advance(step, epoch, {}, take)

    def advance(self, step: int, epoch: int, metrics: Mapping[str, Any], take: Callable[[Any, Any], None]) -> None:
        """Take the steps that are due after so many steps and epochs of the run. Raises ConfigError for a metric that
        there is not."""
        due = (step if self.interval == "step" else epoch) // self.frequency
        for _ in range(due - self._taken):
            if not self.reduce_on_plateau:
                take(self.scheduler, None)
            elif self.monitor is not None and self.monitor in metrics:
                take(self.scheduler, metrics[self.monitor])
            elif self._strict:
                problem = f"{type(self.scheduler).__name__} follows it, and it is not there"
                known = f"there is {', '.join(sorted(metrics)) or 'none yet: evaluate or log it'}"
                raise ConfigError("lr_scheduler.monitor", self.monitor, problem, known)
        self._taken = due

    def state_dict(self) -> dict[str, Any]:
        if not self.reduce_on_plateau:
            return {}
        names = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
        state = {name: getattr(self.scheduler, name) for name in names}
        return {"taken": self._taken, "scheduler": {**state, "best": float(state["best"])}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._taken = state["taken"]
            vars(self.scheduler).update(state["scheduler"])


def read_optimizers(returned: Any, name: str) -> tuple[Optimizer | None, Schedule | None]:
    """The optimizer and schedule, of any form that `configure_optimizers` may return. Raises ConfigError for
    several."""
    remedy = "write a Task with `optimizers` and `train_step`"
    schedules: Any = []
    monitor = None
    if isinstance(returned, Mapping):
        schedules = [returned["lr_scheduler"]] if "lr_scheduler" in returned else []
        returned, monitor = returned["optimizer"], returned.get("monitor")
    elif isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], list):
        returned, schedules = returned
    if isinstance(returned, (list, tuple)):
        if len(returned) != 1:
            raise ConfigError("task", name, f"configure_optimizers gave {len(returned)} optimizers", remedy)
        returned = returned[0]
        if isinstance(returned, Mapping):
            return read_optimizers(returned, name)
    if len(schedules) > 1:
        raise ConfigError("task", name, f"configure_optimizers gave {len(schedules)} schedulers", "chain them in one")
    if not schedules:
        return returned, None
    chosen = schedules[0] if isinstance(schedules[0], Mapping) else {"scheduler": schedules[0]}
    schedule = Schedule(**{"monitor": monitor, **chosen})
    if schedule.reduce_on_plateau and schedule.monitor is None:
        problem = f"{type(schedule.scheduler).__name__} follows a metric, and none is named"
        raise ConfigError("lr_scheduler.monitor", None, problem, 'give {"scheduler": ..., "monitor": "val_loss"}')
    return returned, schedule
