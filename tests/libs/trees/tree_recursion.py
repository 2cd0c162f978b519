"""Recursion by the equations, node by node, in float64: what cells over trees and DAGs are compared with.

Shares no code with `shoal.libs.trees`. With cells as users write them. Tolerance: 1e-12 of the largest entry. Sums over
2,000 nodes in another order differ by about 2,000 * 2**-53 = 2e-13 of the largest summand.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.libs.trees import (
    Cell,
    Children,
    ChildSumLSTMCell,
    NaryLSTMCell,
    RecursiveCell,
    RecursiveTensorCell,
    TreeBatch,
    TreeRNN,
)

D, H = 3, 4
TOLERANCE = 1e-12
State = tuple[Tensor, ...]


# -- cells of users


class SumCell(Cell):
    """h = tanh(x + sum over the children of W h_k)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.below = nn.Linear(width, width)

    def forward(self, x: Tensor, children: Children) -> Tensor:
        if children:
            x = x + children.sum(self.below(children.states[0]))
        return torch.tanh(x)


class GatedCell(Cell):
    """Three states of different widths: each child's memory passes a gate of its parent and of itself."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.input, self.gate = nn.Linear(size, width), nn.Linear(2 * width, width)
        self.rank = nn.Parameter(torch.randn(width, 2))

    def forward(self, x: Tensor, children: Children) -> tuple[Tensor, Tensor, Tensor]:
        memory = z = self.input(x)
        rank = z @ self.rank
        if children:
            h, below, below_rank = children.states
            gate = torch.sigmoid(self.gate(torch.cat([children.expand(z), h], 1)))
            memory = z + children.sum(gate * below)
            rank = rank + children.sum(below_rank).sin()
        return torch.tanh(memory + rank.sum(1, keepdim=True)), memory, rank


class OddCell(Cell):
    """In order, at most three children; the parts of the weights that a call needs depend on the number of children.

    Biases are rows, so that for one node both have the same gradient; one state counts nodes, one has no width; one
    parameter is never used.
    """

    max_arity = 3

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.input = nn.Linear(size, width, bias=False)
        self.by_arity = nn.ModuleList([nn.Linear(k * width, width) for k in (1, 2, 3)])
        self.one, self.other, self.unused = (nn.Parameter(torch.randn(1, width)) for _ in range(3))

    def project(self, x: Tensor) -> Tensor:
        projected: Tensor = self.input(x)
        return projected

    def forward(self, x: Tensor, children: Children) -> tuple[Tensor, Tensor, Tensor]:
        if not children:
            return x + self.one + self.other, torch.ones(len(x), dtype=torch.int64), x[:, 0]
        h, count, scalar = children.states
        assert children.arity
        counts = 1 + children.sum(count)
        mixed = self.by_arity[children.arity - 1](children.stack(h).flatten(1))
        scalars = children.stack(scalar).prod(1).cos()
        return torch.tanh(mixed + self.one + self.other) / counts.unsqueeze(1) + scalars.unsqueeze(1), counts, scalars


# -- the recursion: of one node, from its features and its children's states


def recurse_sum(cell: SumCell) -> Callable[[Tensor, list[State]], State]:
    W, b = cell.below.weight, cell.below.bias
    return lambda x, kids: (torch.tanh(x + sum((W @ h + b for (h,) in kids), torch.zeros(()))),)


def recurse_gated(cell: GatedCell) -> Callable[[Tensor, list[State]], State]:
    def node(x: Tensor, kids: list[State]) -> State:
        z = cell.input.weight @ x + cell.input.bias
        memory, rank = z, z @ cell.rank
        for h, below, _ in kids:
            memory = memory + torch.sigmoid(cell.gate.weight @ torch.cat([z, h]) + cell.gate.bias) * below
        if kids:
            rank = rank + torch.sin(sum((kid[2] for kid in kids), torch.zeros(2)))
        return torch.tanh(memory + rank.sum()), memory, rank

    return node


def recurse_odd(cell: OddCell) -> Callable[[Tensor, list[State]], State]:
    def node(x: Tensor, kids: list[State]) -> State:
        bias = (cell.one + cell.other)[0]
        z = cell.input.weight @ x
        if not kids:
            return z + bias, torch.ones(()), z[0]
        linear = cell.by_arity[len(kids) - 1]
        count = 1 + sum((kid[1] for kid in kids), torch.zeros(()))
        scalar = torch.stack([kid[2] for kid in kids]).prod().cos()
        mixed = linear.weight @ torch.cat([kid[0] for kid in kids]) + linear.bias
        return torch.tanh(mixed + bias) / count + scalar, count, scalar

    return node


def recurse_recursive(cell: RecursiveCell) -> Callable[[Tensor, list[State]], State]:
    """CS224D: h = tanh(W [h_1; h_2] + b); a missing child is zeros."""
    W, b = cell.linear.weight, cell.linear.bias

    def node(x: Tensor, kids: list[State]) -> State:
        return (torch.tanh(W @ join([h for (h,) in kids], W.shape[1]) + b) if kids else x,)

    return node


def recurse_tensor(cell: RecursiveTensorCell) -> Callable[[Tensor, list[State]], State]:
    """h = tanh(z' V z + W z + b) with z = [h_1; h_2]."""
    W = cell.linear.weight
    b = cell.linear.bias
    V = cell.bilinear

    def node(x: Tensor, kids: list[State]) -> State:
        if not kids:
            return (x,)
        z = join([h for (h,) in kids], W.shape[1])
        return (torch.tanh((V @ z) @ z + W @ z + b),)

    return node


def recurse_child_sum(cell: ChildSumLSTMCell) -> Callable[[Tensor, list[State]], State]:
    """arXiv:1503.00075, equations 2 to 8."""
    W = cell.input.weight
    b = cell.input.bias
    H = cell.hidden_size
    U_f, U_iou = cell.below.weight.split([H, 3 * H])

    def node(x: Tensor, kids: list[State]) -> State:
        x_f, x_i, x_o, x_u = (W @ x + b).chunk(4)  # W_f x + b_f, ...
        h_sum = sum((h for h, _ in kids[1:]), kids[0][0]) if kids else torch.zeros(H)  # (2)
        h_i, h_o, h_u = (U_iou @ h_sum).chunk(3)
        i = torch.sigmoid(x_i + h_i)  # (3)
        f = [torch.sigmoid(x_f + U_f @ h) for h, _ in kids]  # (4)
        o = torch.sigmoid(x_o + h_o)  # (5)
        u = torch.tanh(x_u + h_u)  # (6)
        c = sum((f_k * c_k for f_k, (_, c_k) in zip(f, kids, strict=True)), i * u)  # (7)
        return o * torch.tanh(c), c  # (8)

    return node


def recurse_nary(cell: NaryLSTMCell) -> Callable[[Tensor, list[State]], State]:
    """arXiv:1503.00075, equations 9 to 14. U [.., K H]: side by side what belongs to each child, zeros if missing."""
    W = cell.input.weight
    b = cell.input.bias
    H = cell.hidden_size
    width = cell.below.weight.shape[1]
    U_fs, U_iou = cell.below.weight[:width].split(H), cell.below.weight[width:]

    def node(x: Tensor, kids: list[State]) -> State:
        x_f, x_i, x_o, x_u = (W @ x + b).chunk(4)  # W_f x + b_f, ...
        h = join([h for h, _ in kids], width)
        h_i, h_o, h_u = (U_iou @ h if kids else torch.zeros(3 * H)).chunk(3)
        i = torch.sigmoid(x_i + h_i)  # (9)
        f = [torch.sigmoid(x_f + U_fk @ h) for U_fk, _ in zip(U_fs, kids, strict=False)]  # (10)
        o = torch.sigmoid(x_o + h_o)  # (11)
        u = torch.tanh(x_u + h_u)  # (12)
        c = sum((f_k * c_k for f_k, (_, c_k) in zip(f, kids, strict=True)), i * u)  # (13)
        return o * torch.tanh(c), c  # (14)

    return node


def join(vectors: list[Tensor], width: int) -> Tensor:
    """One below the other, and zeros up to `width`."""
    missing = width - sum(map(len, vectors))
    return torch.cat([*vectors, torch.zeros(missing)]) if missing else torch.cat(vectors)


RECURSIONS: dict[type[Cell], Any] = {
    SumCell: recurse_sum,
    GatedCell: recurse_gated,
    OddCell: recurse_odd,
    RecursiveCell: recurse_recursive,
    RecursiveTensorCell: recurse_tensor,
    ChildSumLSTMCell: recurse_child_sum,
    NaryLSTMCell: recurse_nary,
}


def recurse(cell: Cell, x: Tensor, graphs: Sequence[list[list[int]]]) -> Tensor:
    """The outputs of all nodes, [N, S], as they came; `graphs`: of each node of each graph its children."""
    node, outputs = RECURSIONS[type(cell)](cell), []
    for features, children in zip(x.split([len(each) for each in graphs]), graphs, strict=True):
        states: dict[int, State] = {}
        rows = features.unbind()
        for root in range(len(children)):
            waiting = [root]
            while waiting:  # in post-order, each node once
                v = waiting[-1]
                missing = [kid for kid in children[v] if kid not in states]
                waiting += missing
                if not missing:
                    waiting.pop()
                    if v not in states:
                        states[v] = node(rows[v], [states[kid] for kid in children[v]])
        outputs += [states[v][0] for v in range(len(children))]
    return torch.stack(outputs)


# -- comparing


@contextmanager
def float64_on_one_thread() -> Iterator[None]:
    before, num_threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)
    torch.set_num_threads(num_threads)


def children_of(parents: Sequence[int]) -> list[list[int]]:
    kids: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            kids[parent].append(node)
    return kids


@contextmanager
def level_by_level(cell: Cell) -> Iterator[None]:
    cell.run_batch = lambda x, plan: None  # type: ignore[method-assign]
    yield
    del cell.run_batch


def differentiate(outputs: Tensor, weights: Tensor, wanted: Sequence[Tensor]) -> list[Tensor]:
    grads = torch.autograd.grad((outputs * weights).sum(), wanted, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(each) if grad is None else grad for grad, each in zip(grads, wanted, strict=True)]


def assert_close(found: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape, what
    error, largest = float((found - expected).detach().abs().max()), float(expected.detach().abs().max())
    assert error <= tolerance * largest, f"{what}: {error:.1e}, and the largest entry is {largest:.1e}"


def assert_equals_recursion(
    cell: Cell, trees: TreeBatch, graphs: Sequence[list[list[int]]], size: int, ways: Sequence[str] = ("own", "levels")
) -> None:
    x = torch.randn(trees.num_nodes, size, requires_grad=True)
    expected = recurse(cell, x, graphs)
    weights = torch.randn_like(expected)
    names, wanted = ["x", *dict(cell.named_parameters())], [x, *cell.parameters()]
    gradients = differentiate(expected, weights, wanted)
    for way in ways:
        rnn = TreeRNN(cell)
        if way == "own":
            outputs = rnn(trees.arrange_inputs(x), trees)
        else:
            with level_by_level(cell):
                outputs = rnn(trees.arrange_inputs(x), trees)
        found = trees.in_node_order(outputs)
        assert_close(found, expected, f"{way}, values")
        for name, mine, theirs in zip(names, differentiate(found, weights, wanted), gradients, strict=True):
            assert_close(mine, theirs, f"{way}, gradient of {name}")


class Subject:
    """How to make a cell, for nodes of at most `arity` children."""

    def __init__(self, make: Callable[[int], Cell], size: int, max_arity: int | None, *, has_own_way: bool = False):
        self.make = make
        self.size = size
        self.max_arity = max_arity
        self.ways = ("own", "levels") if has_own_way else ("levels",)


SUBJECTS = {
    "child-sum": Subject(lambda arity: ChildSumLSTMCell(D, H), D, None, has_own_way=True),
    "n-ary": Subject(lambda arity: NaryLSTMCell(D, H if arity < 9 else 1, arity), D, 2000, has_own_way=True),
    "recursive": Subject(lambda arity: RecursiveCell(D, arity), D, 2000),
    "tensor": Subject(lambda arity: RecursiveTensorCell(D), D, 2),
    "sum": Subject(lambda arity: SumCell(D), D, None),
    "gated": Subject(lambda arity: GatedCell(D, H), D, None),
    "odd": Subject(lambda arity: OddCell(D, H), D, 3),
}


def grow(choices: Sequence[int], max_arity: int) -> list[int]:
    """The parents of a tree of one node more than there are choices, in a mixed order."""
    parents, free = [-1], [max_arity]
    for choice in choices:
        open_nodes = [node for node, left in enumerate(free) if left]
        parent = open_nodes[choice % len(open_nodes)]
        free[parent] -= 1
        parents.append(parent)
        free.append(max_arity)
    number = np.random.default_rng(len(parents)).permutation(len(parents))
    mixed = [0] * len(parents)
    for node, parent in enumerate(parents):
        mixed[number[node]] = -1 if parent < 0 else int(number[parent])
    return mixed


def chain(length: int) -> list[int]:
    return [*range(1, length), -1]


def star(leaves: int) -> list[int]:
    return [-1] + [0] * leaves
