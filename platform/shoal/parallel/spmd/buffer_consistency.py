"""Whether buffers are still equal on all data ranks: a layer may change them by its own share of a batch.

Batch normalisation does not (see `batch_norm`); other running statistics, codebooks and normalisers do. Called by plans
with several data ranks, on a Trainer's request.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.errors import PlanError
from shoal.parallel.layers.batch_norm import DataGroup
from shoal.parallel.state.gradients import to_local

# Relative to a buffer's norm: different hardware rounds differently, other samples differ by far more.
TOLERANCE = 1e-5


def check_buffers(buffers: Mapping[str, Tensor], ranks: DataGroup) -> None:
    """Raises PlanError, on all ranks or none, for the first buffer that differs between them. Collective."""
    if not buffers:
        return
    everyone = ranks.gather(torch.stack([_checksum(to_local(buffer)) for buffer in buffers.values()]))  # [R, B, 2]
    first = everyone[0]
    alike = (everyone - first).abs() <= TOLERANCE * first[:, 1:]
    alike |= everyone.isfinite().logical_not() & (everyone.isfinite() == first.isfinite())
    different = alike.all(-1).logical_not().nonzero().tolist()
    if different:
        rank, place = different[0]
        problem = f"is a buffer that data ranks 0 and {rank} have made different ones of, each by its own samples"
        remedy = "leave it as it is in training, or use one data rank; persistent=False if nothing depends on it"
        raise PlanError("model", list(buffers)[place], problem, remedy)


def _checksum(buffer: Tensor) -> Tensor:
    values = (torch.view_as_real(buffer) if buffer.is_complex() else buffer).detach().double()
    return torch.stack([values.sum(), values.square().sum().sqrt()])
