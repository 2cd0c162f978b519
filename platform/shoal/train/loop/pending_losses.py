"""The steps since the last exchange of signals: their losses stay on the device until then.

Called by the Trainer. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class PendingStep:
    """A step whose loss is read later, when the device has computed it.

    named: further losses, by the Task's names
    weight: of the loss in a mean over steps
    """

    step: int
    loss: Tensor
    norm: Tensor | None
    indices: list[int] | None
    named: Mapping[str, Tensor] = field(default_factory=dict)
    weight: Tensor | float = 1.0

    def is_finite(self) -> bool:
        norm = self.norm if self.norm is not None else self.loss
        return bool(torch.isfinite(self.loss)) and bool(torch.isfinite(norm))


def sum_losses(steps: list[PendingStep]) -> tuple[float, float, bool]:
    """The weighted sum of the losses, that of the weights, and whether each loss and norm is finite."""
    if not steps:
        return 0.0, 0.0, True
    losses = torch.stack([each.loss for each in steps]).double()
    norms = [each.norm for each in steps if each.norm is not None]
    is_finite = torch.cat([losses, torch.stack(norms).double()]).isfinite() if norms else losses.isfinite()
    weights = torch.tensor([float(each.weight) for each in steps], dtype=torch.double)
    return float((losses.cpu() * weights).sum()), float(weights.sum()), bool(is_finite.all())


def sum_named_losses(steps: list[PendingStep], names: tuple[str, ...]) -> tuple[float, ...]:
    """The weighted sum of each further loss over the steps that have it."""
    sums = [[each.named[name] * each.weight for each in steps if name in each.named] for name in names]
    return tuple(float(torch.stack(found).sum()) if found else 0.0 for found in sums)
