"""What `self.log` receives: the values of a batch, their means over an epoch, and metrics that an epoch computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import ConfigError


class Logs:
    """Of the steps of one kind, training or validation, over an epoch.

    of_batch: the values of the newest batch, or of the newest hook
    sizes:    of the newest batch, as far as the module says them
    """

    def __init__(self, *, is_training: bool) -> None:
        self._is_training = is_training
        self.of_batch: dict[str, Tensor] = {}
        self.sizes: dict[str, int] = {}
        self._sums: dict[str, tuple[Tensor | float, float]] = {}  # [] and its weight
        self._metrics: dict[str, Any] = {}

    @contextmanager
    def receive(self, module: Any, num_samples: int) -> Iterator[dict[str, Tensor]]:
        """Within, what the module logs is of a batch of so many samples, and in the result."""
        self.of_batch, self.sizes = {}, {}

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            self._add(name, value, num_samples, **{**dict(zip(("prog_bar", "logger"), args, strict=False)), **options})

        def log_dict(values: Mapping[str, Any], *args: Any, **options: Any) -> None:
            for name, value in values.items():
                log(name, value, *args, **options)

        outer = {name: vars(module).get(name) for name in ("log", "log_dict")}
        module.log, module.log_dict = log, log_dict
        try:
            yield self.of_batch
        finally:
            for name, before in outer.items():
                delattr(module, name) if before is None else setattr(module, name, before)

    def _add(
        self,
        name: str,
        value: Any,
        num_samples: int,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        **others: Any,  # of display, and `sync_dist`: a record has the mean over all ranks anyway
    ) -> None:
        if reduce_fx not in ("mean", torch.mean):
            problem = f"is logged with reduce_fx={reduce_fx!r}, and records have means"
            raise ConfigError("self.log", name, problem, "log a torchmetrics object, as its MaxMetric or SumMetric")
        is_epochs = not self._is_training if on_epoch is None else on_epoch
        if hasattr(value, "compute"):  # a metric of torchmetrics
            self._metrics[name] = value
            cached = getattr(value, "_forward_cache", None)
            if self._is_training and on_step is not False and isinstance(cached, Tensor):
                self.of_batch[name] = cached.detach().float()
            return
        number = torch.as_tensor(value, dtype=torch.float32).detach()
        if batch_size is not None:
            self.sizes[name] = batch_size
        if not self._is_training or on_step is not False:
            self.of_batch[name] = number
        if self._is_training and is_epochs:
            total, weight = self._sums.get(name, (0.0, 0.0))
            count = batch_size or num_samples
            self._sums[name] = total + number * count, weight + count

    def reset(self) -> None:
        """Begin an epoch."""
        for metric in self._metrics.values():
            metric.reset()
        self._metrics, self._sums = {}, {}

    def compute(self, num_ranks: int) -> dict[str, float]:
        """The means and metrics of the epoch so far, over all ranks. Collective.

        Those of training that each step logs, too, end in `_epoch`.
        """
        computed = {name: metric.compute() for name, metric in self._metrics.items()}  # over the ranks, by torchmetrics
        named = {name: (float(total), weight) for name, (total, weight) in self._sums.items()}
        means = average_over_ranks(named, num_ranks)
        values = {**means, **{name: float(value) for name, value in computed.items()}}
        is_stepped = self.of_batch if self._is_training else {}
        return {f"{name}_epoch" if name in is_stepped else name: value for name, value in values.items()}

    def state_dict(self) -> dict[str, list[float]]:
        return {name: [float(total), weight] for name, (total, weight) in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        self._sums = {name: (total, weight) for name, (total, weight) in state.items()}


def average_over_ranks(sums: Mapping[str, tuple[float, float]], num_ranks: int) -> dict[str, float]:
    """The quotients of (sum, weight), each added up over the ranks, which have the same names. Collective."""
    names = sorted(sums)
    values = torch.tensor([sums[name] for name in names], dtype=torch.float64).reshape(-1, 2)  # [K, 2]
    if num_ranks > 1 and names and dist.is_initialized():
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        values = values.to(device)
        dist.all_reduce(values)
    return {name: total / weight for name, (total, weight) in zip(names, values.tolist(), strict=True) if weight}
