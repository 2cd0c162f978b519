"""Detects data ranks that differ: in the parts of a sharded model that they use in a step, and in their buffers.

FSDP2 gathers a block's parameters when it is called, and adds up the existing gradients: if ranks called different
blocks, or used different parameters of one, one parameter's values would be taken for another's. Called by plans that
shard, at the end of a step, before its gradients are used. Buffers are compared before they are saved or evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.errors import PlanError
from shoal.parallel.layers.batch_norm import DataGroup
from shoal.parallel.state.gradients import to_local


class BlockUsageCheck:
    """The blocks that this rank calls, in order, and the parameters with a gradient afterwards.

    blocks:     with their names; each of them is sharded
    may_differ: whether a parameter may have a gradient on some ranks only, since it counts as zero on the others
    """

    def __init__(self, blocks: Sequence[tuple[str, nn.Module]], ranks: DataGroup, may_differ: bool) -> None:
        self._names = [name for name, _ in blocks]
        self._ranks, self._may_differ = ranks, may_differ
        self._calls: list[int] = []
        for index, (_, block) in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._record_call, index))  # which a copy of a model copies

    def _record_call(self, index: int, *_: Any) -> None:
        self._calls.append(index)

    def check(self, parameters: Sequence[tuple[str, nn.Parameter]], device: torch.device) -> None:
        """Compare all calls since the last check with the other data ranks. Collective.

        parameters: those that may have a gradient; none after an evaluation
        device:     of the model

        Raises PlanError, on all of the ranks or none.
        """
        calls, self._calls = self._calls, []
        has = [] if self._may_differ else [parameter.grad is not None for _, parameter in parameters]
        sums = [crc32(repr(calls).encode()), crc32(bytes(has))]
        mine = torch.tensor(sums, device=self._ranks.control_device(device))
        everyone = self._ranks.gather(mine)
        if bool((everyone == everyone[0]).all()):
            return
        used = [name for (name, _), is_used in zip(parameters, has, strict=False) if is_used]
        self._raise_difference([self._names[index] for index in calls], used)

    def _raise_difference(self, calls: list[str], used: list[str]) -> None:
        found: list[Any] = [None] * self._ranks.size
        dist.all_gather_object(found, (calls, used), group=self._ranks.group)
        (first_calls, first_used), *others = found
        for rank, (their_calls, their_used) in enumerate(others, start=1):
            for block, other in zip_longest(first_calls, their_calls, fillvalue="no other"):
                if block != other:
                    problem = f"data rank 0 has called the block {block}, and data rank {rank} {other} in its place"
                    remedy = "shards need the same blocks on all ranks: use ddp with parallel.dynamic=true"
                    raise PlanError("parallel.shard", True, problem, remedy)
            for name in sorted({*first_used} ^ {*their_used}):
                problem = f"{name} has a gradient on one of the data ranks 0 and {rank}, and none on the other"
                remedy = "say parallel.dynamic=true when ranks may use other parameters, which are zero then"
                raise PlanError("parallel.dynamic", False, problem, remedy)


# Relative to a buffer's norm: different hardware rounds differently, other samples differ by far more.
TOLERANCE = 1e-5


def check_buffers(buffers: Mapping[str, Tensor], ranks: DataGroup) -> None:
    """Raises PlanError, on all ranks or none, for the first buffer that differs between them. Collective."""
    if not buffers:
        return
    sums = []
    for buffer in map(to_local, buffers.values()):
        values = (torch.view_as_real(buffer) if buffer.is_complex() else buffer).detach().double()
        sums.append(torch.stack([values.sum(), values.square().sum().sqrt()]))
    everyone = ranks.gather(torch.stack(sums))  # [R, B, 2]
    first = everyone[0]
    alike = (everyone - first).abs() <= TOLERANCE * first[:, 1:]
    alike |= everyone.isfinite().logical_not() & (everyone.isfinite() == first.isfinite())
    different = alike.all(-1).logical_not().nonzero().tolist()
    if different:
        rank, index = different[0]
        problem = f"is a buffer that data ranks 0 and {rank} have made different ones of, each by its own samples"
        remedy = "leave it as it is in training, or use one data rank; persistent=False if nothing depends on it"
        raise PlanError("model", list(buffers)[index], problem, remedy)
