"""The same models in several forms: recursion as the equations stand, level by level in plain torch, and a user's cell.

Legend: see `forests`; m nodes of a level, x [N, D] features, W, b, U as in `forests.Weights`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from shoal.libs.trees import Cell, Children
from shoal.libs.trees.plan import TreePlan


def recurse_lstm(x: Tensor, W: Tensor, b: Tensor, U: Tensor, children: list[list[int]]) -> Tensor:
    """h [1, H] of node 0: equations 9 to 14 of arXiv:1503.00075 if U is wider than H, else 2 to 8."""
    H, w, x_of = len(b) // 4, U.shape[1], x.split(1)  # the gradients of slices would be as large as x, each

    def state(node: int) -> tuple[Tensor, Tensor]:
        (f, gates), kept = F.linear(x_of[node], W, b).split([H, 3 * H], 1), x.new_zeros(())
        if children[node]:
            h, c = (torch.cat(each) for each in zip(*map(state, children[node]), strict=True))  # [K, H]
            kept = ((f + F.linear(h.view(-1, w), U[:w]).view(-1, H)).sigmoid() * c).sum(0, keepdim=True)
            gates = gates + F.linear(h.sum(0, keepdim=True) if w == H else h.view(1, w), U[w:])
        i, o, u = gates.chunk(3, 1)
        c = i.sigmoid() * u.tanh() + kept
        return o.sigmoid() * c.tanh(), c

    return state(0)[0]


@dataclass(frozen=True)
class Levels:
    """A plan of binary trees as plain torch needs it.

    pairs: [n, 2] places of the children of each inner node; roots: [T] places; starts: inner nodes before each level
    """

    num_leaves: int
    pairs: Tensor
    roots: Tensor
    starts: list[int]

    @classmethod
    def of(cls, plan: TreePlan) -> Self:
        place_of_row = np.empty_like(plan.row)
        place_of_row[plan.row] = np.arange(len(plan.row))
        places, num_edges = torch.from_numpy(place_of_row), len(plan.edge_parent)
        return cls(plan.num_leaves, places[:num_edges].view(-1, 2), places[num_edges:], plan.level_start.tolist())


def lstm_by_levels(x: Tensor, W: Tensor, b: Tensor, U: Tensor, levels: Levels) -> Tensor:
    """h [T, H] of the roots, x in input order: what one writes in plain torch, with a gather and a join for each level.

    Autograd sees every operation of every level.
    """
    H, w, L = len(b) // 4, U.shape[1], levels.num_leaves
    from_x = F.linear(x, W, b)
    h, c = _finish(from_x[:L, H:], None)
    for begin, end in pairwise(levels.starts):
        f, gates = from_x[L + begin : L + end].split([H, 3 * H], 1)
        h_e, c_e = h[levels.pairs[begin:end]], c[levels.pairs[begin:end]]  # [m, 2, H]
        forget = (f.unsqueeze(1) + F.linear(h_e.view(-1, w), U[:w]).view(-1, 2, H)).sigmoid()
        below = h_e.sum(1) if w == H else h_e.view(-1, w)
        h_m, c_m = _finish(gates + F.linear(below, U[w:]), (forget * c_e).sum(1))
        h, c = torch.cat([h, h_m]), torch.cat([c, c_m])
    return h[levels.roots]


def _finish(gates: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    i, o, u = gates.chunk(3, 1)
    c = i.sigmoid() * u.tanh()
    c = c if kept is None else c + kept
    return o.sigmoid() * c.tanh(), c


class GatedCell(Cell):
    """A cell as a user writes it: a gate between the sum of the children and a new state; x [N, D], state [N, H]."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input = nn.Linear(input_size, 2 * hidden_size)
        self.below = nn.Linear(hidden_size, 2 * hidden_size, bias=False)

    def project(self, x: Tensor) -> Tensor:
        projected: Tensor = self.input(x)
        return projected

    def forward(self, x: Tensor, children: Children) -> Tensor:
        if not children:
            gate, new = x.chunk(2, 1)
            return torch.sigmoid(gate) * torch.tanh(new)
        total = children.sum(children.states[0])
        gate, new = (x + self.below(total)).chunk(2, 1)
        return torch.lerp(total, torch.tanh(new), torch.sigmoid(gate))


def recurse_gated(x: Tensor, cell: GatedCell, children: list[list[int]]) -> Tensor:
    """h [1, H] of node 0 by the equations of `GatedCell`."""
    x_of = x.split(1)

    def state(node: int) -> Tensor:
        from_x = cell.input(x_of[node])
        if not children[node]:
            gate, new = from_x.chunk(2, 1)
            return torch.sigmoid(gate) * torch.tanh(new)
        total = torch.cat([state(child) for child in children[node]]).sum(0, keepdim=True)
        gate, new = (from_x + cell.below(total)).chunk(2, 1)
        return torch.lerp(total, torch.tanh(new), torch.sigmoid(gate))

    return state(0)
