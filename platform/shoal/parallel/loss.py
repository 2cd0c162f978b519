"""What a Task's loss or metric divides by: the number of samples, or a count of its own (`Mean`).

Owns `Mean`, and the sums that make one mean of the parts of a batch. Called by every plan, and by what runs a model
outside training. Communicates nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from shoal.errors import ConfigError

LOSS = "loss"  # the name of what a step minimises


@dataclass(frozen=True)
class Mean:
    """A loss or metric as a numerator and a denominator, for one that is no mean over the samples of the batch.

        total = cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        return shoal.Mean(total, (labels != -100).sum())

    Totals and counts of all micro-batches and ranks are added up before they are divided, so a batch has the gradients
    of one process however it is split. A part of count 0 adds nothing. Multiply `total` to scale a loss.

    total: scalar tensor: the sum of the terms
    count: scalar, at least 0: the number of terms, or the sum of their weights
    """

    total: Tensor
    count: Tensor | float

    def value(self) -> Tensor:
        """Scalar: the mean; 0 if the count is 0."""
        dtype = torch.promote_types(self.total.dtype, torch.float32)  # a count may be beyond the digits of bf16
        return self.total * invert_count(torch.as_tensor(self.count, dtype=dtype, device=self.total.device))


@dataclass(frozen=True)
class FoundMean(Mean):
    """A `Mean` that a Task returned as a scalar.

    size: the count if all terms count equally; None: it depends on the contents of the batch
    """

    size: int | None = None


Loss = Tensor | Mean


def require_loss(loss: object, field: str = "Task.loss") -> Loss:
    """Raises ConfigError for what is neither a scalar tensor nor a Mean of two scalars."""
    if isinstance(loss, Tensor) and loss.ndim == 0:
        return loss
    if isinstance(loss, Mean):
        if isinstance(loss.count, Tensor) and loss.count.requires_grad:
            problem = "gave a Mean whose count has a gradient, which the parts of a batch cannot have each for itself"
            raise ConfigError(field, "count", problem, "detach() the count, or return a scalar")
        for name, value in (("total", loss.total), ("count", loss.count)):
            if isinstance(value, Tensor) and value.ndim:
                problem = f"gave a Mean whose {name} is a tensor {list(value.shape)}"
                raise ConfigError(field, name, problem, f"add the {name} up to a scalar")
        if isinstance(loss.total, Tensor):
            return loss
        raise ConfigError(field, "total", f"gave a Mean whose total is a {type(loss.total).__name__}", "give a tensor")
    what = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    remedy = "return a scalar tensor, the mean over the samples, or a shoal.Mean(total, count)"
    remedy = "return it from stateful_metrics()" if hasattr(loss, "merge_state") else remedy
    raise ConfigError(field, what, "is not a scalar", remedy)


def get_value(loss: Loss) -> Tensor:
    """The loss of a batch that is not split, as a scalar."""
    return loss.value() if isinstance(loss, Mean) else loss


def split_mean(loss: Loss, num_samples: float) -> Tensor:
    """[2], float64: what to add up over the parts of a batch: numerator and denominator. Detached.

    num_samples: of this part that count; 0: the part adds nothing
    """
    if not isinstance(loss, Mean):
        mean = loss.detach().double().reshape(())
        return torch.stack(
            [mean * num_samples if num_samples else torch.zeros_like(mean), mean.new_tensor(num_samples)]
        )
    total = loss.total.detach().double().reshape(())
    both = torch.stack([total, torch.as_tensor(loss.count, dtype=total.dtype, device=total.device).reshape(())])
    return both if num_samples else torch.zeros_like(both)


class StepCounts:
    """The counts of a step's `Mean`s, by name, added up over its micro-batches.

    kinds: whether a loss is a `Mean`, by name, where that is known before the first step

    They are relative to the number of samples that a rank has when the global batch is divided equally: then a sum of
    gradients has the scale of a mean until it is divided, whatever the counts are.
    """

    def __init__(self, kinds: Mapping[str, bool] = MappingProxyType({})) -> None:
        self._counts: dict[str, Tensor] = {}
        self._kinds = dict(kinds)
        self._sizes: dict[str, float] = {}  # terms per sample of a `FoundMean` whose terms count equally
        self._weights: dict[str, float] = {}  # of the scalars of this step
        self._agreed: set[str] = set()

    def begin(self) -> None:
        """Forget the counts of a step that was not finished."""
        self._counts, self._weights = {}, {}

    def weigh(self, name: str, loss: Loss, weight: float, num_samples: int) -> Tensor:
        """A micro-batch's part of the step's loss.

        weight: of the micro-batch, if its loss is the mean over its `num_samples` samples

        Raises ConfigError for a loss that is a `Mean` for some batches only: ranks would not wait for each other.
        A mean of torch's whose terms count equally may be either.
        """
        if isinstance(loss, FoundMean) and loss.size is not None:
            self._sizes[name] = loss.size / num_samples
        is_mean = isinstance(loss, Mean)
        if self._kinds.setdefault(name, is_mean) != is_mean:
            loss = self._convert(name, loss, num_samples)
        if not isinstance(loss, Mean):
            self._weights[name] = self._weights.get(name, 0.0) + weight
            return loss if weight == 1.0 else loss * weight
        each = weight / num_samples
        dtype = torch.promote_types(loss.total.dtype, torch.float32)
        count = torch.as_tensor(loss.count, dtype=dtype, device=loss.total.device) * each
        self._counts[name] = self._counts[name] + count if name in self._counts else count
        return loss.total * each

    def _convert(self, name: str, loss: Loss, num_samples: int) -> Loss:
        """A loss of the other kind than those before it."""
        if not isinstance(loss, Mean) and name in self._sizes:
            size = num_samples * self._sizes[name]
            return Mean(loss * size, size)
        if isinstance(loss, FoundMean) and loss.size is not None and int(loss.count) == loss.size:
            return loss.value()
        problem = "is a shoal.Mean, or a mean of torch's with a count, for some batches, and another scalar for others"
        raise ConfigError("Task", name, problem, "return a Mean for each batch: one of count 0 adds nothing")

    def agree(self, name: str, device: torch.device, average_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """After the first step of the loss `name`: if it is a `Mean` on any rank, it is one on all. Collective then.

        Raises ConfigError, on every rank, as `weigh` does.
        """
        if name in self._agreed:
            return
        self._agreed.add(name)
        is_mean = self._kinds[name]
        found = torch.tensor([is_mean, is_mean and name not in self._sizes], dtype=torch.float32, device=device)
        share, strict_share = average_over_ranks(found).tolist()
        if share in (0.0, 1.0):
            return
        if strict_share:
            self._convert(name, Mean(torch.zeros(()), 0), 1)
        self._kinds[name] = True
        self._sizes.setdefault(name, 1.0)
        if not is_mean:
            self._counts[name] = torch.tensor(self._weights[name], device=device)

    def take(self, average_over_ranks: Callable[[Tensor | None], object]) -> dict[str, Tensor]:
        """The count of each `Mean` of the step, which begins anew. Collective.

        average_over_ranks: replaces the counts by their means over the data ranks, as gradients are averaged; None if
                            there are none
        """
        self._weights = {}
        names = sorted(self._counts)
        counts = torch.stack([self._counts[name] for name in names]) if names else None
        self._counts = {}
        average_over_ranks(counts)
        return {} if counts is None else dict(zip(names, counts.unbind(), strict=True))


def invert_count(count: Tensor) -> Tensor:
    """The factor that makes a total a mean; 0 for a count of 0, whose total is 0 too."""
    return torch.where(count == 0, torch.zeros_like(count), 1.0 / count)
