"""The division of weights, and of what the optimiser stores for them, among servers.

All parameters lie one after the other in one flat vector, by dtype float32. With an optimiser that treats each element
by itself, a server owns a range of that vector, whatever tensors it cuts; with another, whole tensors. Pure functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop, SparseAdam

from shoal.batch_tree import balance_by_size
from shoal.errors import ConfigError
from shoal.extend.train import list_parameters

NUMBER = "number"  # of a group among all groups of the whole optimiser
ELEMENTWISE = (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adadelta, Adagrad, RMSprop, Rprop)


@dataclass(frozen=True)
class ParameterSlice:
    """A range of one parameter on one server."""

    parameter: int  # its index
    begin: int  # elements of the parameter, flattened
    end: int
    offset: int  # elements before it in the server's own vector

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Partition:
    """pieces: for each server. A server's vector is its pieces, one after the other."""

    pieces: tuple[tuple[ParameterSlice, ...], ...]

    @property
    def num_servers(self) -> int:
        return len(self.pieces)

    def get_size(self, server: int) -> int:
        """Elements of the server's vector."""
        return sum(piece.size for piece in self.pieces[server])

    def find_range(self, server: int, chosen: range) -> tuple[int, int]:
        """Where the server's vector has these parameters: its first element, and the one after the last."""
        pieces = [piece for piece in self.pieces[server] if piece.parameter in chosen]
        return (pieces[0].offset, pieces[-1].offset + pieces[-1].size) if pieces else (0, 0)

    def read(self, server: int, vector: Tensor, parameters: Sequence[Tensor], chosen: range | None = None) -> int:
        """Copy the server's vector into the parameters, or into the chosen ones; returns the bytes."""
        num_bytes = 0
        for piece in self.pieces[server]:
            if chosen is None or piece.parameter in chosen:
                part = vector[piece.offset : piece.offset + piece.size]
                parameters[piece.parameter].view(-1)[piece.begin : piece.end].copy_(part)
                num_bytes += part.nbytes
        return num_bytes

    def write(
        self, server: int, parameters: Sequence[Tensor | None], vector: Tensor, chosen: range | None = None
    ) -> int:
        """Copy the parameters, or the chosen ones, or zeros for None, into the server's vector; returns the bytes."""
        num_bytes = 0
        for piece in self.pieces[server]:
            if chosen is not None and piece.parameter not in chosen:
                continue
            part, given = vector[piece.offset : piece.offset + piece.size], parameters[piece.parameter]
            num_bytes += part.nbytes
            if given is None:
                part.zero_()
            else:
                part.copy_(given.reshape(-1)[piece.begin : piece.end])
        return num_bytes


def divide(sizes: Sequence[int], num_servers: int, *, by_parameter: bool) -> Partition:
    """Divide parameters of `sizes` elements so that the servers' vectors are about equal.

    by_parameter: only between parameters

    Raises ConfigError when a server would own nothing.
    """
    most = len(sizes) if by_parameter else sum(sizes)
    if num_servers > most:
        what = "parameters, and this optimiser needs each whole" if by_parameter else "elements"
        raise ConfigError("sync.servers", num_servers, f"is more than the model has {what}", f"at most {most}")
    if by_parameter:
        return _divide_parameters(sizes, num_servers)
    total, first = sum(sizes), 0
    pieces: list[list[ParameterSlice]] = [[] for _ in range(num_servers)]
    bounds = [total * server // num_servers for server in range(num_servers + 1)]
    for index, size in enumerate(sizes):
        for server in range(num_servers):
            begin, end = max(first, bounds[server]), min(first + size, bounds[server + 1])
            if begin < end:
                pieces[server].append(ParameterSlice(index, begin - first, end - first, begin - bounds[server]))
        first += size
    return Partition(tuple(map(tuple, pieces)))


def divide_fragments(sizes: Sequence[int], num_fragments: int) -> list[range]:
    """Consecutive parameters of about equal bytes: the indices of each fragment. Raises ConfigError for too many."""
    if num_fragments > len(sizes):
        problem = "is more than the model has parameters, which stay whole"
        raise ConfigError("sync.fragments", num_fragments, problem, f"at most {len(sizes)}")
    ends, until = [0], list(accumulate(sizes))
    for fragment in range(1, num_fragments):
        wanted = until[-1] * fragment / num_fragments
        possible = range(ends[-1] + 1, len(sizes) - num_fragments + fragment + 1)
        ends.append(min(possible, key=lambda end: abs(until[end - 1] - wanted)))
    return [range(begin, end) for begin, end in pairwise([*ends, len(sizes)])]


def _divide_parameters(sizes: Sequence[int], num_servers: int) -> Partition:
    owners = balance_by_size(np.array(sizes), num_servers)
    pieces = []
    for server in range(num_servers):
        offset, own = 0, []
        for index in np.flatnonzero(owners == server).tolist():
            own.append(ParameterSlice(index, 0, sizes[index], offset))
            offset += sizes[index]
        pieces.append(tuple(own))
    return Partition(tuple(pieces))


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether it treats each element by itself, so that a tensor may be cut."""
    return type(optimizer) in ELEMENTWISE


def take_part(optimizer: Optimizer, partition: Partition, server: int, vector: Tensor) -> Optimizer:
    """The optimiser of one server: the same settings and groups, over views of the server's `vector`.

    Raises ConfigError for parameters that are not float32.
    """
    index = {id(each): place for place, each in enumerate(each for g in optimizer.param_groups for each in g["params"])}
    views: dict[int, list[torch.nn.Parameter]] = {}
    by_parameter = not is_elementwise(optimizer)
    shapes = [each.shape for each in list_parameters(optimizer)]
    for piece in partition.pieces[server]:
        part = vector[piece.offset : piece.offset + piece.size]
        view = torch.nn.Parameter(part.view(shapes[piece.parameter]) if by_parameter else part)
        views.setdefault(piece.parameter, []).append(view)
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        own = [view for each in group["params"] for view in views.get(index[id(each)], [])]
        groups.append({**group, "params": own, NUMBER: number})
    if by_parameter:  # a class whose constructor is unknown
        optimizer.param_groups[:] = groups
        return optimizer
    accepted = inspect.signature(type(optimizer)).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    return type(optimizer)([group for group in groups if group["params"]], **defaults)


def plan_partition(optimizer: Optimizer, num_servers: int) -> Partition:
    """Divide what `optimizer` optimises. Every process of a run computes the same.

    Raises ConfigError for parameters that are not float32, for more servers than there is to divide, and for an
    optimiser that no server can step.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    problem = "takes sparse gradients" if isinstance(optimizer, SparseAdam) else ""
    if closure is not None and closure.default is inspect.Parameter.empty:
        problem = "computes the loss itself"
    if problem:
        kind = f"the optimiser {type(optimizer).__name__} {problem}, and a server has dense gradients alone"
        raise ConfigError("sync.kind", "parameter_server", kind, "use sync=all_reduce")
    parameters = list_parameters(optimizer)
    for each in parameters:
        if each.dtype != torch.float32:
            problem = f"has a parameter of the type {each.dtype}, and servers keep float32"
            raise ConfigError("sync.kind", "parameter_server", f"the model {problem}", "use sync=all_reduce")
    return divide([each.numel() for each in parameters], num_servers, by_parameter=not is_elementwise(optimizer))


def describe_parameters(optimizer: Optimizer) -> list[list[int]]:
    """The shapes, in order: the same for two processes with one model."""
    return [list(each.shape) for each in list_parameters(optimizer)]
