"""A cell computes nodes from their children: what a user writes to define a model over trees.

Owns the base class and what a cell sees of a level. Called by `TreeRNN`. Knows neither plans nor batches.
Legend: m nodes that are computed at once, e their children, P features of `project`, S units of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

_MAX_GRAPHS = 64  # of all cells of a process; beyond, torch runs a cell as it is, and warns


class Children:
    """The children of m nodes, side by side: the first node's, the second's, ...

    states: each [e, S], in the order in which the cell returned them; none for leaves
    arity:  children of each node, where all have equally many; None where they differ
    False for leaves (`if not children`).
    """

    def __init__(self, states: Sequence[Tensor], num_nodes: int, arity: int | None, parent: Tensor | None) -> None:
        self.states = tuple(states)
        self.num_nodes = num_nodes
        self.arity = arity
        self._parent = parent

    def __bool__(self) -> bool:
        return self.arity != 0

    def sum(self, values: Tensor) -> Tensor:
        """[e, ...] to [m, ...]: over the children of each node; 0 without children."""
        if self.arity == 1:
            return values
        if self.arity is not None:
            return values.view(self.num_nodes, self.arity, *values.shape[1:]).sum(1)
        assert self._parent is not None
        return values.new_zeros(self.num_nodes, *values.shape[1:]).index_add(0, self._parent, values)

    def expand(self, values: Tensor) -> Tensor:
        """[m, ...] to [e, ...]: the value of its parent, for each child."""
        if self.arity == 1:
            return values
        if self.arity is not None:
            return values.repeat_interleave(self.arity, 0)
        assert self._parent is not None
        return values.index_select(0, self._parent)

    def stack(self, values: Tensor) -> Tensor:
        """[e, S] to [m, arity, S]: the children of each node in their order. For cells with `max_arity`."""
        if self.arity is None:
            raise ValueError("these nodes differ in their number of children: give the cell a `max_arity`")
        return values.view(self.num_nodes, self.arity, *values.shape[1:])


class Cell(nn.Module):
    """One node from its features and its children's states. Users write `forward`; `TreeRNN(cell)` runs it over trees.

        class Mean(Cell):
            def __init__(self, width):
                super().__init__()
                self.below = nn.Linear(width, width)

            def forward(self, x, children):
                if children:
                    x = x + children.sum(self.below(children.states[0]))
                return torch.tanh(x)

    It is called with many nodes at once, of all trees of a batch, and must compute each as if it were alone.

    max_arity: None: nodes of any number of children, also mixed, where their order does not matter (`children.sum`).
               A number: the nodes of one call have equally many children, at most so many (`children.stack`)
    """

    max_arity: int | None = None

    def project(self, x: Tensor) -> Tensor:
        """[N, D] to [N, P]: what each node needs of its own features, once for all nodes before the first level."""
        return x

    def forward(self, x: Tensor, children: Children) -> Tensor | tuple[Tensor, ...]:
        """x [m, P] of `project` to the states of the nodes, each [m, S]; the first is the node's output."""
        raise NotImplementedError(f"{type(self).__name__}.forward")

    def run_batch(self, x: Tensor, plan: object) -> Tensor | None:
        """The outputs [N, S] of a whole batch from x [N, D], where the cell has a quicker way; None: level by level."""
        return None


CellForward = Callable[[Tensor, Children], Tensor | tuple[Tensor, ...]]


def compute_level(
    cell: CellForward, x: Tensor, states: Sequence[Tensor], num_nodes: int, arity: int | None, parent: Tensor | None
) -> tuple[Tensor, ...]:
    """The states of the nodes, each [m, S], from x [m, P] and the children's states, each [e, S]; see `Children`."""
    computed = cell(x, Children(states, num_nodes, arity, parent))
    return (computed,) if isinstance(computed, Tensor) else tuple(computed)


def compute_level_compiled(
    cell: Cell, x: Tensor, states: Sequence[Tensor], num_nodes: int, arity: int | None, parent: Tensor | None
) -> tuple[Tensor, ...]:
    """`compute_level` by a graph of torch.compile that serves any number of nodes.

    A graph of a full tree serves one shape, and compiling it takes long. Graphs of a level differ only in how many
    children each node has: one is for leaves, then one for each arity of a cell with `max_arity`, or one for others.
    """
    if num_nodes == 1:  # torch would compile another graph for this number alone
        return compute_level(cell, x, states, num_nodes, arity, parent)
    with torch._dynamo.config.patch(recompile_limit=_MAX_GRAPHS):
        computed: tuple[Tensor, ...] = _compile_level()(cell, x, states, num_nodes, str(arity), parent)
    return computed


@cache
def _compile_level() -> Any:
    """The arity comes as a text, for a graph of its own: numbers become variables of a graph."""

    def compute(
        cell: Cell, x: Tensor, states: Sequence[Tensor], num_nodes: int, arity: str, parent: Tensor | None
    ) -> tuple[Tensor, ...]:
        return compute_level(cell, x, states, num_nodes, None if arity == "None" else int(arity), parent)

    return torch.compile(compute, dynamic=True)


class CellLinear(nn.Linear):
    """The weights of a cell that reads them itself. An endpoint's precision replaces plain linear layers, not these."""


class RecursiveCell(Cell):
    """CS224D's recursive network: h = tanh(W [h_1; ...; h_K] + b); a leaf's state is its features, x [N, H].

    Source: Socher et al., ICML 2011, equation 2; CS224D lecture notes 4. A node with fewer than K children has zeros in
    their place. Features of inner nodes are not used.
    """

    def __init__(self, hidden_size: int, max_arity: int = 2) -> None:
        super().__init__()
        self.max_arity = max_arity
        self.linear = CellLinear(max_arity * hidden_size, hidden_size)

    def forward(self, x: Tensor, children: Children) -> Tensor:
        if not children:
            return x
        below = children.stack(children.states[0]).flatten(1)
        return torch.tanh(nn.functional.linear(below, self.linear.weight[:, : below.shape[1]], self.linear.bias))


class RecursiveTensorCell(Cell):
    """The recursive neural tensor network: h = tanh(z' V z + W z + b) with z = [h_1; h_2]; a leaf's state is x [N, H].

    Source: Socher et al., EMNLP 2013, section 4.3. V [H, 2H, 2H]. Binary: an inner node has two children, or one, with
    zeros in the place of the second. Features of inner nodes are not used.
    """

    max_arity = 2

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = CellLinear(2 * hidden_size, hidden_size)
        self.bilinear = nn.Parameter(torch.empty(hidden_size, 2 * hidden_size, 2 * hidden_size))
        nn.init.uniform_(self.bilinear, -0.5 / hidden_size, 0.5 / hidden_size)

    def forward(self, x: Tensor, children: Children) -> Tensor:
        if not children:
            return x
        below = children.stack(children.states[0]).flatten(1)  # [m, w], w = 2H or H
        width = below.shape[1]
        bilinear = self.bilinear[:, :width, :width].reshape(-1, width)  # [H w, w]
        products = nn.functional.linear(below, bilinear).view(len(below), -1, width)  # [m, H, w]
        linear = nn.functional.linear(below, self.linear.weight[:, :width], self.linear.bias)
        return torch.tanh((products @ below.unsqueeze(2)).squeeze(2) + linear)
