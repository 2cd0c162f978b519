"""Communication between the stages of a pipeline besides a schedule's own messages; and with their data replicas.

Owns the process groups. Every rank forms all of them, in the same order. Called by `pipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.parallel.spec import Coordinates, ParallelDims

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
