"""The validation data, once through the model: means over all samples, the same numbers on every rank.

Called by the Trainer and by whoever looks at a trained Task. Changes nothing of the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.data import Loader
from shoal.parallel.model import ParallelModel


def evaluate(model: ParallelModel, loader: Loader) -> dict[str, float]:
    """The mean loss and metrics over every sample of `loader`, each counted once. Collective."""
    sums: dict[str, Tensor] = {}
    num_samples = 0
    for batch in loader:
        found = model.evaluate(batch, loader.num_samples)
        sums = {name: sums[name] + value.double() if sums else value.double() for name, value in found.items()}
        num_samples += loader.num_samples
    values = torch.stack([*sums.values()])
    counted = torch.cat([values, values.new_tensor([num_samples])])  # on the same device
    *totals, count = model.total(counted).tolist()
    return {name: total / count for name, total in zip(sums, totals, strict=True)}
