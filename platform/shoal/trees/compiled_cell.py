"""A cell compiled by torch.compile: few graphs for levels of any size. Called by `TreeRNN`, knows no plans.

A graph of a whole tree would have to be compiled for each shape, in seconds. A level's graph differs only in its number
of nodes and in how many children each has, so it serves all batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shoal.trees.cell import Cell, Children

_MAX_GRAPHS = 64  # of all cells of a process; beyond, torch runs a cell uncompiled, and warns
BUCKETS = False


def compute_level(
    cell: Cell, x: Tensor, states: Sequence[Tensor], num_nodes: int, arity: int | None, parent: Tensor | None
) -> tuple[Tensor, ...]:
    """The states of the nodes, each [m, S]: x [m, P], the children's states [e, S], see `Children`."""
    made = cell(x, Children(states, num_nodes, arity, parent))
    return (made,) if isinstance(made, Tensor) else tuple(made)


def compute_level_compiled(
    cell: Cell, x: Tensor, states: Sequence[Tensor], num_nodes: int, arity: int | None, parent: Tensor | None
) -> tuple[Tensor, ...]:
    """`compute_level` through a graph of any number of nodes; a single node is computed without one."""
    if num_nodes == 1:  # torch would compile a graph for this number alone
        return compute_level(cell, x, states, num_nodes, arity, parent)
    if BUCKETS:
        return _padded(cell, x, states, num_nodes, arity, parent)
    with torch._dynamo.config.patch(recompile_limit=_MAX_GRAPHS):
        made: tuple[Tensor, ...] = _compiled(True)(cell, x, states, num_nodes, str(arity), parent)
    return made


@cache
def _compiled(dynamic: bool) -> Any:
    return torch.compile(_compute_level, dynamic=dynamic)


def _compute_level(
    cell: Cell, x: Tensor, states: Sequence[Tensor], num_nodes: int, arity: str, parent: Tensor | None
) -> tuple[Tensor, ...]:
    """The arity as a word: a graph for each, while numbers become variables."""
    return compute_level(cell, x, states, num_nodes, None if arity == "None" else int(arity), parent)


def _padded(cell, x, states, m, arity, parent):
    M = 16
    while M < m + (arity is None):
        M *= 2
    if arity is None:
        e = len(parent)
        E = 16
        while E < e:
            E *= 2
        parent = torch.nn.functional.pad(parent, (0, E - e), value=M - 1)
    else:
        E = arity * M

    def pad(t, n):
        return torch.cat([t, t.new_zeros(n - len(t), *t.shape[1:])]) if n > len(t) else t

    with torch._dynamo.config.patch(recompile_limit=_MAX_GRAPHS):
        made = _compiled(False)(cell, pad(x, M), [pad(s, E) for s in states], M, str(arity), parent)
    return tuple(s[:m] for s in made)
