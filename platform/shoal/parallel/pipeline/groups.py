"""Communication between the stages of a pipeline besides a schedule's own messages; and with their data replicas.

Owns the process groups. Every rank forms all of them, in the same order. Called by `pipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.parallel.spec import Coordinates, ParallelDims
from shoal.parallel.state.gradients import to_local

BUCKET_BYTES = 25 << 20
HEADER_SIZE = 12  # of a tensor whose shape the receiver does not know: dtype, dimensions, sizes
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class PipelineGroups:
    """pipeline: the ranks with the same samples, and the same part of split layers; data: those with the same stages
    and the same part; None for this rank alone."""

    def __init__(self, degrees: ParallelDims, rank: int) -> None:
        self.degrees, self.coordinates = degrees, degrees.coordinates(rank)
        self.pipeline = self._create_groups([self._pipeline_ranks(*each) for each in self._list_pipelines()], rank)
        shares = [
            [degrees.rank(Coordinates(stage, data, tensor)) for data in range(degrees.data)]
            for stage in range(degrees.pipeline)
            for tensor in range(degrees.tensor)
        ]
        self.data = self._create_groups(shares, rank) if degrees.data > 1 else None
        self._rank = rank

    def make_group(self, pipeline_ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """The group of some stages' ranks in one pipeline; None on other ranks. Collective."""
        sets = [[self._pipeline_ranks(*each)[rank] for rank in pipeline_ranks] for each in self._list_pipelines()]
        return self._create_groups(sets, self._rank)

    def _list_pipelines(self) -> list[tuple[int, int]]:
        """Each as (data, tensor)."""
        return list(product(range(self.degrees.data), range(self.degrees.tensor)))

    def _pipeline_ranks(self, data: int, tensor: int) -> list[int]:
        return [self.degrees.rank(Coordinates(index, data, tensor)) for index in range(self.degrees.pipeline)]

    @staticmethod
    def _create_groups(sets: list[list[int]], rank: int) -> dist.ProcessGroup | None:
        own: dist.ProcessGroup | None = None
        for ranks in sets:
            formed = dist.new_group(ranks)
            own = formed if rank in ranks else own
        return own


def sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, factor: float = 1.0) -> None:
    """Sum the gradients over the ranks of `group`, times `factor`; None where no rank has one.

    `parameters` correspond on all ranks. Collective.
    """
    if not parameters:
        return
    device = parameters[0].device
    has = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32, device=device)
    dist.all_reduce(has, group=group)
    used = [parameter for parameter, count in zip(parameters, has.tolist(), strict=True) if count]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:  # another rank may have used other rows
            parameter.grad = parameter.grad.to_dense()
        elif isinstance(parameter.grad, DTensor):  # the use in a split layer determines its sharding
            assert isinstance(parameter, DTensor)
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    under_way: list[tuple[list[Tensor], Tensor, Any]] = []
    for bucket in _make_buckets([to_local(parameter.grad) for parameter in used if parameter.grad is not None]):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        under_way.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in under_way:
        work.wait()
        if factor != 1.0:
            flat.mul_(factor)
        for gradient, summed in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
            gradient.copy_(summed.view(gradient.shape))


def _make_buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    size_bytes = 0
    for gradient in gradients:
        if not buckets or size_bytes > BUCKET_BYTES or buckets[-1][0].dtype != gradient.dtype:
            buckets.append([])
            size_bytes = 0
        buckets[-1].append(gradient)
        size_bytes += gradient.numel() * gradient.element_size()
    return buckets


def send_tensor(tensor: Tensor, to: int, group: dist.ProcessGroup) -> None:
    """Send a tensor to a rank of `group` that does not know the shape."""
    header = torch.zeros(HEADER_SIZE, dtype=torch.int64, device=tensor.device)
    words = [DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    header[: len(words)] = torch.tensor(words)
    dist.send(header, group=group, group_dst=to)
    dist.send(tensor.contiguous(), group=group, group_dst=to)


def receive_tensor(sender: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Receive a tensor that a rank of `group` sends by `send`."""
    header = torch.zeros(HEADER_SIZE, dtype=torch.int64, device=device)
    dist.recv(header, group=group, group_src=sender)
    kind, num_dims, *sizes = header.tolist()
    tensor = torch.empty(sizes[:num_dims], dtype=DTYPES[kind], device=device)
    dist.recv(tensor, group=group, group_src=sender)
    return tensor
