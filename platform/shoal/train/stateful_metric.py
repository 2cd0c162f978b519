"""Validation metrics that are not means over samples, such as AUROC and F1: their state is merged over the ranks.

Owns the protocol, which the metrics of torchmetrics follow, and one evaluation's use of it. Called by `evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.utils._pytree import tree_map_only

from shoal.batch_tree import map_tensors
from shoal.errors import ConfigError
from shoal.parallel import World


class StatefulMetric(Protocol):
    """A metric of torchmetrics, or an object with these methods. It can be pickled."""

    def update(self, *values: Any) -> None:
        """Count a batch."""
        ...

    def merge_state(self, incoming_state: Any) -> None:
        """Count what another such object has counted."""
        ...

    def compute(self) -> Any:
        """The value: a scalar, or a dict of scalars."""
        ...

    def reset(self) -> None:
        """Forget everything."""
        ...


Update = Callable[[str, StatefulMetric, Any, Any], None]  # a metric's name, itself, outputs, batch


class MetricSet:
    """The stateful metrics of one Task, over evaluation after evaluation.

    counts: whether this rank's outputs are counted; of ranks with the same samples one does
    finish: called at the end of an evaluation, on every rank: what it gives are further metrics
    watch:  called with the outputs and the batch, on the CPU
    """

    def __init__(
        self,
        metrics: Mapping[str, StatefulMetric],
        update: Update,
        world: World,
        counts: bool,
        finish: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._metrics = dict(metrics)
        self._update = update
        self._world = world
        self._counts = counts
        self.finish, self.watch = finish, list[Callable[[Any, Any], None]]()
        self._has_updates = False

    def observe(self, outputs: Any, batch: Any) -> None:
        """Count a batch, on the CPU: there the metrics are, and from there they reach other ranks."""
        if self._counts:
            if self._world.device.type != "cpu":
                outputs, batch = tree_map_only(Tensor, _copy_to_cpu, outputs), map_tensors(batch, _copy_to_cpu)
            for watch in self.watch:
                watch(outputs, batch)
            for name, metric in self._metrics.items():
                self._update(name, metric, outputs, batch)
            self._has_updates = True

    def compute(self) -> dict[str, float]:
        """The values over the samples of all ranks since the last call. Collective.

        Raises ConfigError for a value that is no number, and when no rank has any sample.
        """
        if not self._metrics:
            return {}
        every = [found for found in self._world.gather(self._metrics if self._has_updates else None) if found]
        if not every:
            raise ConfigError("Task.stateful_metrics", list(self._metrics), "have no sample", "give validation data")
        first, *others = every
        values: dict[str, float] = {}
        for name, metric in first.items():
            for other in others:
                metric.merge_state(other[name])
            values |= _to_numbers(name, metric.compute())
        for metric in self._metrics.values():
            metric.reset()
        self._has_updates = False
        return values


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    return tensor.cpu()


def _to_numbers(name: str, value: object) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {key: number for part, each in value.items() for key, number in _to_numbers(part, each).items()}
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
        return {name: float(value)}
    what = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ConfigError("Task.stateful_metrics", name, f"gives {what}", "let it give one number, as by average='macro'")
