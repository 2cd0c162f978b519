"""The bytes that a rank sends in a collective: ring algorithms, by the sizes of the arguments.

For n ranks and S bytes in total: all-reduce 2 (n-1)/n S, all-gather and reduce-scatter (n-1)/n S, broadcast and reduce
(n-1)/n S (a ring passes all but its end), a message S at the sender and 0 at the receiver. Gloo, which is used on the
CPU, reduce-scatters by an all-reduce of a copy, of which each rank keeps its part: 2 (n-1)/n S, as counted on the wire
(torch 2.13). Called by the operator counter for each operator; knows nothing of plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from shoal.batch_tree import tensors_of

# operator -> (the argument with the full size, factor of (n - 1) / n)
_FULL_ARGUMENT: dict[str, tuple[int, float]] = {
    "allreduce_": (0, 2.0),
    "allreduce_coalesced_": (0, 2.0),
    "_allgather_base_": (0, 1.0),
    "allgather_": (0, 1.0),
    "allgather_coalesced_": (0, 1.0),
    "allgather_into_tensor_coalesced_": (0, 1.0),
    "_reduce_scatter_base_": (1, 1.0),
    "reduce_scatter_": (1, 1.0),
    "reduce_scatter_tensor_coalesced_": (1, 1.0),
    "alltoall_base_": (1, 1.0),
    "alltoall_": (1, 1.0),
    "broadcast_": (0, 1.0),
    "reduce_": (0, 1.0),
}
# Functional collectives: whether the input (or the output) has the full size, and the factor.
_FUNCTIONAL: dict[str, tuple[bool, float]] = {
    "all_reduce": (True, 2.0),
    "all_reduce_coalesced": (True, 2.0),
    "all_gather_into_tensor": (False, 1.0),
    "all_gather_into_tensor_out": (False, 1.0),
    "all_gather_into_tensor_coalesced": (False, 1.0),
    "reduce_scatter_tensor": (True, 1.0),
    "reduce_scatter_tensor_coalesced": (True, 1.0),
    "all_to_all_single": (True, 1.0),
    "broadcast": (True, 1.0),
}


_is_cuda_assumed = False
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def sent_bytes(op: Any, args: Sequence[Any], out: Any) -> float:
    """The bytes that this rank sends in one call of `op`; 0 for operators that are not collectives."""
    name: str = op._overloadpacket.__name__
    if op.namespace == "c10d" and name == "send":
        return float(_count_bytes(args[0]))
    if not is_collective(op):
        return 0.0
    if op.namespace == "c10d":
        index, factor = _FULL_ARGUMENT[name]
        full = args[index]
    else:
        takes_whole, factor = _FUNCTIONAL[name.removesuffix("_")]
        full = args[0] if takes_whole else out
    if "reduce_scatter" in name and is_on_cpu(args):
        factor = 2.0
    num_ranks = _find_group(op, args).size()
    return factor * _count_bytes(full) * (num_ranks - 1) / num_ranks


def find_group_ranks(op: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """The ranks of the group of a collective `op`, in order."""
    return tuple(dist.get_process_group_ranks(_find_group(op, args)))


def find_scratch_tensors(op: Any, args: Sequence[Any], out: Any) -> list[Tensor]:
    """Tensors that Gloo copies while it runs this: those that it gathers or reduces."""
    if op.namespace not in _NAMESPACES or not is_on_cpu(args):
        return []
    name = op._overloadpacket.__name__
    whole: Any = ()
    if op.namespace == "c10d" and name in ("_allgather_base_", "_reduce_scatter_base_"):
        whole = args[_FULL_ARGUMENT[name][0]]
    elif name.startswith("all_gather_into"):
        whole = out
    elif name.startswith("reduce_scatter_tensor"):
        whole = args[0]
    return list(tensors_of(whole))


def is_collective(op: Any) -> bool:
    """Whether all ranks of a group call `op`."""
    name: str = op._overloadpacket.__name__
    if op.namespace == "c10d":
        return name in _FULL_ARGUMENT
    return op.namespace in _NAMESPACES and name.removesuffix("_") in _FUNCTIONAL


def is_on_cpu(args: Sequence[Any]) -> bool:
    """Whether Gloo runs it, and not a device's own library."""
    return not _is_cuda_assumed and any(each.is_cpu for each in tensors_of(args))


@contextmanager
def assume_cuda(is_assumed: bool) -> Iterator[None]:
    """Within, tensors on the CPU count as on GPUs, whose library copies nothing."""
    global _is_cuda_assumed
    before, _is_cuda_assumed = _is_cuda_assumed, is_assumed
    try:
        yield
    finally:
        _is_cuda_assumed = before


def _find_group(op: Any, args: Sequence[Any]) -> dist.ProcessGroup:
    """The group among the arguments."""
    if op.namespace == "c10d":
        group = next((group for each in args if (group := _unbox_group(each)) is not None), None)
    else:
        named = args[[argument.name for argument in op._schema.arguments].index("group_name")]
        is_name = isinstance(named, str)
        group = _resolve_process_group(dist.GroupName(named)) if is_name else _unbox_group(named)
    group = group or dist.group.WORLD
    assert group is not None
    return group


def _unbox_group(value: Any) -> dist.ProcessGroup | None:
    if isinstance(value, dist.ProcessGroup):
        return value
    if type(value).__name__ != "ScriptObject":
        return None
    try:
        return dist.ProcessGroup.unbox(value)
    except RuntimeError:  # another class: ReduceOp
        return None


def _count_bytes(value: Any) -> int:
    """Bytes of the tensors in `value`, at any nesting."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(value))
