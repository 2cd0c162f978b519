"""The distributions of weights and gradients at one step, for TensorBoard.

Called by the Trainer between two steps if `histograms_every_steps` is set. Reads rank 0's part: of sharded weights its
shard, of a pipeline its stages. No communication.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.parallel.model import ParallelModel
from shoal.train.reporting.event_log import EventLog, NullLog

NUM_BINS = 64
CHUNK_SIZE = 2**24  # torch.histc counts in float32, which cannot count further by 1


def write_histograms(journal: EventLog, model: ParallelModel, step: int) -> None:
    """Write `weights/NAME` and `gradients/NAME` of each parameter; free on ranks that write nothing."""
    if isinstance(journal, NullLog):
        return
    for name, parameter in model.named_parameters():
        for kind, tensor in (("weights", parameter), ("gradients", parameter.grad)):
            found = None if tensor is None else compute_histogram(tensor)
            if found is not None:
                journal.log_histogram(step, f"{kind}/{name}", *found)


def compute_histogram(tensor: Tensor, num_bins: int = NUM_BINS) -> tuple[np.ndarray, np.ndarray] | None:
    """Counts [bins] and edges [bins + 1] of the finite values of this rank's part; None if there are none.

    Counts both parts of complex values, and the stored values of a sparse gradient.
    """
    local = tensor.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    local = local.coalesce().values() if local.is_sparse else local
    values = (torch.view_as_real(local.resolve_conj()) if local.is_complex() else local).float().flatten()
    values = values[torch.isfinite(values)]
    if not values.numel():
        return None
    low, high = (float(each) for each in torch.aminmax(values))
    if low == high:  # a bin around the only value
        margin = max(abs(low), 1.0) * 1e-3
        low, high = low - margin, high + margin
    counts = torch.stack([torch.histc(part, num_bins, low, high).long() for part in values.split(CHUNK_SIZE)])
    return counts.sum(0).cpu().numpy(), np.linspace(low, high, num_bins + 1)
