"""The optimizers and the schedules of `configure_optimizers`, in all forms that Lightning takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
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
        self.monitor, self._strict = monitor, strict
        self.reduce_on_plateau = bool(others.get("reduce_on_plateau")) or isinstance(scheduler, ReduceLROnPlateau)

    def advance(self, count: int, metrics: Mapping[str, Any], take: Callable[[Any, Any], None]) -> None:
        """Take a step, if one is due.

        count: finished batches of the epoch, or finished epochs of the run, by the interval: as Lightning counts them

        Raises ConfigError for a metric that there is not.
        """
        if count % self.frequency:
            return
        if not self.reduce_on_plateau:
            take(self.scheduler, None)
        elif self.monitor is not None and self.monitor in metrics:
            take(self.scheduler, metrics[self.monitor])
        elif self._strict:
            problem = f"{type(self.scheduler).__name__} follows it, and it is not there"
            known = f"there is {', '.join(sorted(metrics)) or 'none yet: evaluate or log it'}"
            raise ConfigError("lr_scheduler.monitor", self.monitor, problem, known)


def read_optimizers(returned: Any) -> tuple[list[Optimizer], list[Schedule]]:
    """The optimizers and schedules, of any form that `configure_optimizers` may return."""
    if returned is None:
        return [], []
    if isinstance(returned, (list, tuple)) and len(returned) == 2 and isinstance(returned[0], (list, tuple)):
        optimizers, schedules = returned
        return list(optimizers), [_read_schedule(each) for each in _list(schedules)]
    optimizers, schedules = [], []
    for each in _list(returned):
        if isinstance(each, Mapping):
            optimizers.append(each["optimizer"])
            schedules += [_read_schedule(found, each) for found in _list(each.get("lr_scheduler", []))]
        else:
            optimizers.append(each)
    return optimizers, schedules


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _read_schedule(found: Any, of: Mapping[str, Any] = MappingProxyType({})) -> Schedule:
    return Schedule(**{"monitor": of.get("monitor"), **(found if isinstance(found, Mapping) else {"scheduler": found})})
