"""A cell compiled by torch.compile: a few graphs serve levels of any size. Called by `TreeRNN`; knows no plans.

A graph of a whole tree serves one shape, and compiling it takes long. Graphs of a level differ only in how many
children each node has: one is for leaves, then one for each arity of a cell with `max_arity`, or one for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shoal.libs.trees.cell import Cell, Children

CellForward = Callable[[Tensor, Children], Tensor | tuple[Tensor, ...]]

_MAX_GRAPHS = 64  # of all cells of a process; beyond, torch runs a cell as it is, and warns


def compute_level(
    cell: CellForward, x: Tensor, states: Sequence[Tensor], num_nodes: int, arity: int | None, parent: Tensor | None
) -> tuple[Tensor, ...]:
    """The states of the nodes, each [m, S], from x [m, P] and the children's states, each [e, S]; see `Children`."""
    made = cell(x, Children(states, num_nodes, arity, parent))
    return (made,) if isinstance(made, Tensor) else tuple(made)


def compute_level_compiled(
    cell: Cell, x: Tensor, states: Sequence[Tensor], num_nodes: int, arity: int | None, parent: Tensor | None
) -> tuple[Tensor, ...]:
    """`compute_level` by a graph that serves any number of nodes."""
    if num_nodes == 1:  # torch would compile another graph for this number alone
        return compute_level(cell, x, states, num_nodes, arity, parent)
    with torch._dynamo.config.patch(recompile_limit=_MAX_GRAPHS):
        made: tuple[Tensor, ...] = _compiled()(cell, x, states, num_nodes, str(arity), parent)
    return made


@cache
def _compiled() -> Any:
    return torch.compile(_compute_level, dynamic=True)


def _compute_level(
    cell: Cell, x: Tensor, states: Sequence[Tensor], num_nodes: int, arity: str, parent: Tensor | None
) -> tuple[Tensor, ...]:
    """The arity comes as a word, for a graph of its own: numbers become variables of a graph."""
    return compute_level(cell, x, states, num_nodes, None if arity == "None" else int(arity), parent)
