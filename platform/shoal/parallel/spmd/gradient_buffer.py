"""All gradients of a replica in one buffer, averaged over the ranks of a host in one sum after the backward pass.

Replaces DistributedDataParallel where `ShmAllReduce` computes the sums: the computing thread does that itself, so
buckets, which overlap sending and computing, would only add cost. Also for a Task's own steps, which may call parts of
the model. Called by `DdpModel`.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.parallel.comm.shm_all_reduce import ShmAllReduce


class GroupSum:
    """Sums over a process group, as `ShmAllReduce` computes them within a host."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.size = group, dist.get_world_size(group)

    def sum(self, values: Tensor, factor: float = 1.0) -> Tensor:
        dist.all_reduce(values, group=self._group)
        return values.mul_(factor) if factor != 1.0 else values


class FlatGradients:
    """The gradients of `parameters`, in one tensor for each dtype, where hooks put them as they appear."""

    def __init__(self, parameters: list[nn.Parameter], all_reduce: ShmAllReduce | GroupSum) -> None:
        self._all_reduce = all_reduce
        self._flat: list[Tensor] = []
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            alike = [parameter for parameter in parameters if parameter.dtype == dtype]
            flat = torch.zeros(sum(each.numel() for each in alike), dtype=dtype, device=alike[0].device)
            begin = 0
            for parameter in alike:
                like = torch.empty_like(parameter)  # dense, in the parameter's memory order, as an optimiser's state
                view = flat[begin : begin + parameter.numel()].as_strided(like.shape, like.stride(), begin)
                parameter.register_post_accumulate_grad_hook(partial(_move_gradient, view))
                self._views.append((parameter, view))
                begin += parameter.numel()
            self._flat.append(flat)

    def average(self, may_skip: bool) -> None:
        """Replace each gradient by the mean over all ranks; a rank without one counts as zero. Collective.

        A parameter that no rank has used keeps None. Without `may_skip` every rank must have all of them.
        """
        counts: list[int] = []
        if may_skip:
            used = torch.ones(len(self._views), dtype=torch.int32, device=self._flat[0].device)
            for index, (parameter, view) in enumerate(self._views):
                if parameter.grad is None:
                    view.zero_()
                    used[index] = 0
            counts = self._all_reduce.sum(used).tolist()
        for flat in self._flat:
            self._all_reduce.sum(flat, 1.0 / self._all_reduce.size)
        for (parameter, view), count in zip(self._views, counts, strict=False):
            parameter.grad = view if count else None


def _move_gradient(destination: Tensor, parameter: Tensor) -> None:
    """Move a new gradient into `destination`; later micro-steps of the same step add to it there."""
    if parameter.grad is not destination:
        assert parameter.grad is not None
        destination.copy_(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
        parameter.grad = destination
