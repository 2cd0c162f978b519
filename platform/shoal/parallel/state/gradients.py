"""Operations on gradients after the backward pass, wherever their parts are: their global norm, and clipping.

Called by every plan. Supports DTensors: a part that several ranks have is counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

BUCKET_BYTES = 25 << 20


def clear(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def get_local_values(gradient: Tensor) -> Tensor:
    """The values of a gradient on this rank, sharing its memory; of a sparse one, its stored values."""
    return gradient._values() if gradient.is_sparse else to_local(gradient)


def sum_over_ranks(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, factor: float = 1.0) -> None:
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


def global_norm(
    parameters: Iterable[nn.Parameter], device: torch.device, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The L2 norm of all gradients, each part counted once, in their widest dtype and at least in float32.

    Collective if there are DTensors or a `group`.

    device: of the parameters, and of the norm, even without any gradient
    group:  the ranks over which full parameters are distributed, each on one rank (stages)
    """
    plain: list[Tensor] = []
    split: dict[tuple[object, ...], list[DTensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and grad.is_sparse:  # may contain a row twice
            parameter.grad = grad.coalesce()
            plain.append(get_local_values(parameter.grad))
        elif isinstance(grad, DTensor):
            if any(isinstance(each, Partial) for each in grad.placements):  # the ranks' values are yet to be added up
                sums = [Replicate() if isinstance(each, Partial) else each for each in grad.placements]
                parameter.grad = grad = grad.redistribute(placements=sums)
            split.setdefault((grad.device_mesh, grad.placements), []).append(grad)
        elif grad is not None:
            plain.append(grad)
    squares = [_sum_squares(plain)] if plain else []
    squares += [_sum_dtensor_squares(grads) for grads in split.values()]
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=device, dtype=torch.float64)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt().to(_find_norm_dtype([*plain, *chain.from_iterable(split.values())]))


def clip(parameters: Iterable[nn.Parameter], max_norm: float, device: torch.device) -> Tensor:
    """Scale the gradients to a global norm of at most `max_norm`; returns the old norm, as torch's
    `clip_grad_norm_`."""
    parameters = list(parameters)
    norm = global_norm(parameters, device)
    scale(parameters, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def scale(parameters: Iterable[nn.Parameter], factor: float | Tensor) -> None:
    grads = [get_local_values(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor)


def _sum_squares(tensors: list[Tensor]) -> Tensor:
    """In float64, which ranks with gradients of different dtypes can add up."""
    parts = [torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in tensors]
    norms = torch._foreach_norm(parts, 2, _find_norm_dtype(parts))
    return torch.stack(norms).double().square().sum()


def _find_norm_dtype(gradients: Iterable[Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, {gradient.dtype for gradient in gradients}, torch.float32).to_real()


def _sum_dtensor_squares(grads: list[DTensor]) -> Tensor:
    mesh, placements = grads[0].device_mesh, grads[0].placements
    parts = [grad.to_local() for grad in grads]
    total = _sum_squares([part for part in parts if part.numel()] or [parts[0].new_zeros(1)])
    for dim, placement in enumerate(placements):
        if not placement.is_replicate():
            dist.all_reduce(total, group=mesh.get_group(dim))
    return total
