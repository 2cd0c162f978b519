"""What `self.log` receives: the values of a batch, their means over an epoch, and metrics that an epoch computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import ConfigError
from shoal.extend.parallel import Mean


class Logs:
    """Of the steps of one kind, training or validation, over an epoch.

    of_batch: the values of the newest batch, or of the newest hook; of training also those that earlier steps logged
              alone, since a record has the means over steps
    sums:     and weights of an epoch's means so far
    """

    def __init__(self, *, is_training: bool) -> None:
        self._is_training = is_training
        self.of_batch: dict[str, Any] = {}
        self.sums: dict[str, tuple[Tensor | float, float]] = {}
        self._metrics: dict[str, Any] = {}

    @contextmanager
    def receive(self, module: Any, num_samples: int) -> Iterator[dict[str, Any]]:
        """Within, what the module logs is of a batch of so many samples, or of a hook, and in the result."""
        self.of_batch = self.of_batch if self._is_training else {}

        def log(name: str, value: Any, prog_bar: bool = False, logger: bool = True, **options: Any) -> None:
            self._add(name, value, num_samples, **options)

        def log_dict(values: Mapping[str, Any], *args: Any, **options: Any) -> None:
            for name, value in values.items():
                log(name, value, *args, **options)

        outer = {name: each for name, each in vars(module).items() if name in ("log", "log_dict")}
        module.log, module.log_dict = log, log_dict
        try:
            yield self.of_batch
        finally:
            del module.log, module.log_dict
            vars(module).update(outer)  # of the step that the hook is within

    def _add(
        self,
        name: str,
        value: Any,
        num_samples: int,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        batch_size: int = 0,
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
        if not self._is_training or on_step is not False:
            is_mean = batch_size and num_samples and not self._is_training
            self.of_batch[name] = Mean(number * batch_size, batch_size) if is_mean else number
        if self._is_training and is_epochs:
            total, weight = self.sums.get(name, (0.0, 0.0))
            count = batch_size or num_samples
            self.sums[name] = total + number * count, weight + count

    def reset(self) -> None:
        """Begin an epoch."""
        for metric in self._metrics.values():
            metric.reset()
        self._metrics, self.sums = {}, {}

    def compute(self, num_ranks: int) -> dict[str, float]:
        """The means and metrics of the epoch so far, over all ranks. Collective.

        Those of training that each step logs, too, end in `_epoch`.
        """
        computed = {name: metric.compute() for name, metric in self._metrics.items()}  # over the ranks, by torchmetrics
        named = {name: (float(total), weight) for name, (total, weight) in self.sums.items()}
        means = average_over_ranks(named, num_ranks)
        values = {**means, **{name: float(value) for name, value in computed.items()}}
        is_stepped = self.of_batch if self._is_training else {}
        return {f"{name}_epoch" if name in is_stepped else name: value for name, value in values.items()}


def average_over_ranks(sums: Mapping[str, tuple[float, float]], num_ranks: int) -> dict[str, float]:
    """The quotients of (sum, weight), each added up over the ranks, which have the same names. Collective."""
    names = sorted(sums)
    values = torch.tensor([sums[name] for name in names], dtype=torch.float64).reshape(-1, 2)  # [K, 2]
    if num_ranks > 1 and names and dist.is_initialized():
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        values = values.to(device)
        dist.all_reduce(values)
    return {name: total / weight for name, (total, weight) in zip(names, values.tolist(), strict=True) if weight}
