"""Tree-LSTMs (Tai et al., arXiv:1503.00075): the child-sum one, equations 2 to 8, and the N-ary one, equations 9 to 14.

On a CPU a batch of trees is one function of autograd in NumPy (`TreeLSTMFunction`); chains are handed to torch's LSTM;
otherwise the cell runs level by level. All give the same values. Legend: see `cell`; H hidden units, D features of a
node, gates in the order f i o u; w = H for child-sum, K H for N-ary with at most K children.

In the function of autograd, products with the nodes' features are one before the first level, and the gradients of
the weights one each after the last; only the products with the children's states are made level by level, and nearly
every operand of a level is a slice (see `plan`). tanh(x) is 2 sigmoid(2 x) - 1, with the inner factor in the weights:
torch's sigmoid takes a third of the time of a tanh. NumPy otherwise: cheaper calls, and a choice of the library of
the products (`blas`). Torch's modules hold the weights.

Legend there: N nodes, L leaves, n inner, E edges (an edge is its child's output row); D features, H units; m nodes
and e edges in a piece of a level; w = H for child-sum, K H for N-ary, of which nodes with a children use the first a
H. W [4H, D] and b [4H] in the gate order f i o u; U [w + 3H, w]: f (N-ary: H rows for each child), then i o u.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from shoal.differentiation import differentiate_plainly, is_each_operation_needed, is_plain_backward_needed
from shoal.libs.trees.blas import Product, use_torch_threads
from shoal.libs.trees.cell import Cell, CellLinear, Children
from shoal.libs.trees.plain_levels import compute_plainly
from shoal.libs.trees.plan import Ints, TreePlan

MAX_NODES = 256  # in one piece of a level: their gates stay in the second-level cache

Array = np.ndarray
Compute = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class _Saved(NamedTuple):
    """What the backward pass needs of the forward pass, alongside x and the weights."""

    h: Array  # [N, H] by rows, like c
    c: Array
    tanh_c: Array  # [N, H] by places
    gates: Array  # [N, 3H] i o u
    forget: Array  # [E, H]
    seen: Array | None = None  # [n, H] child-sum: the sum of the children's h


class TreeLSTMFunction(torch.autograd.Function):
    """(x [N, D] in input order, W, b, U, plan of trees, N-ary or child-sum, `compute`) to h [N, H] in output order.

    compute: x, W, b, U to h in plain torch, for second derivatives
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, W: Tensor, b: Tensor, U: Tensor, plan: TreePlan, is_nary: bool, compute: Compute
    ) -> Tensor:
        arrays = [_view_array(each) for each in (x, W, b, U)]
        with use_torch_threads() as product:
            saved = _compute(arrays, plan, is_nary, product)
        ctx.plan, ctx.compute = plan, compute
        h, *others = (torch.from_numpy(each) for each in saved if each is not None)
        # torch rejects tensors that were changed in place. No array of a weight is retained: see `_view_array`.
        ctx.save_for_backward(x, W, b, U, h, *others)
        return h

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor) -> tuple[Tensor | None, ...]:
        x, W, b, U, *saved = ctx.saved_tensors
        if is_plain_backward_needed(grad_h):
            found = differentiate_plainly(ctx.compute, (x, W, b, U), ctx.needs_input_grad[:4], grad_h)
            return *found, None, None, None
        arrays = _Saved(*(each.numpy() for each in saved))
        with use_torch_threads() as product:
            x_, W_, U_ = map(_view_array, (x, W, U))
            h, c, tanh_c, gates, forget, seen = arrays
            H = h.shape[1]
            w = U_.shape[1]
            L = ctx.plan.num_leaves
            E = len(forget)
            d_h = grad_h.detach().numpy().copy()
            d_c = np.empty_like(h)
            d_gates = np.empty_like(gates)
            d_forget = np.empty_like(forget)
            d_c[E:] = 0  # roots
            for piece in reversed(ctx.plan.split_levels(MAX_NODES, by_arity=seen is None)):
                at = piece.positions
                kids = piece.edges
                own = ctx.plan.row[piece.positions]
                d_c_m = d_c[own]
                _activate_backward(d_h[own], d_c_m, gates[at], tanh_c[at], d_gates[at])
                if piece.arity == 0:
                    continue
                f_e = forget[kids]
                d_f = d_forget[kids]
                d_h_e = d_h[kids]
                parent = None if piece.arity else ctx.plan.edge_parent[kids] - (at.start - L)
                d_c_e = _expand(d_c_m, piece.arity, parent)
                np.multiply(d_c_e, f_e, out=d_c[kids])
                np.multiply(d_c_e, c[kids], out=d_f)
                _sigmoid_backward(d_f, f_e)
                width = piece.arity * H if seen is None else H
                d_sum = product(d_gates[at], U_[w:, :width])  # [m, width]
                d_h_e += d_sum.reshape(-1, H) if seen is None else _expand(d_sum, piece.arity, parent)
                d_h_e += product(d_f.reshape(-1, width), U_[:width, :width]).reshape(-1, H)
            arity = ctx.plan.max_arity if int(ctx.plan.arity.min()) == ctx.plan.max_arity else None
            # [n, H]: W_f x serves all children of a node
            d_f_n = _sum_children(d_forget, arity, ctx.plan.first_edge[:-1])
            d_W = np.concatenate([product(d_f_n.T, x_[L:]), product(d_gates.T, x_)])
            d_b = np.concatenate([d_f_n.sum(0), d_gates.sum(0)])
            if seen is None:
                d_U = _gradient_by_arity(d_forget, d_gates[L:], h, U_, ctx.plan, product)
            else:
                d_U = np.concatenate([product(d_forget.T, h[:E]), product(d_gates[L:].T, seen)])
            d_x = product(d_gates, W_[H:])
            d_x[L:] += product(d_f_n, W_[:H])
            gradients = (d_x, d_W, d_b, d_U)
        return *map(torch.from_numpy, gradients), None, None, None


def _view_array(tensor: Tensor) -> Array:
    """The same memory, as long as the tensor has it: FSDP frees the weights' between forward and backward.

    `Tensor.numpy` would forbid that for good.
    """
    array: Array = np.from_dlpack(tensor.detach())
    return array


def _compute(arrays: list[Array], plan: TreePlan, is_nary: bool, product: Product) -> _Saved:
    x, W, b, U = arrays
    H = len(b) // 4
    w = U.shape[1]
    N = len(x)
    L = plan.num_leaves
    E = len(plan.edge_parent)
    factor = np.repeat(np.array([1, 2], x.dtype), [w + 2 * H, H])  # f i o by a sigmoid, u by tanh
    below = (U * factor[:, None]).T  # [w, w + 3H]
    into = (W * factor[w - H :, None]).T  # [D, 4H]
    b = b * factor[w - H :]
    gates = product(x, into[:, H:])  # [N, 3H]
    forget = (product(x[L:], into[:, :H]) + b[:H]).take(plan.edge_parent, 0)  # [E, H]
    h, c, tanh_c = (np.empty((N, H), x.dtype) for _ in range(3))
    seen = None if is_nary else np.empty((N - L, H), x.dtype)
    for piece in plan.split_levels(MAX_NODES, by_arity=is_nary):
        at = piece.positions
        kids = piece.edges
        own = plan.row[piece.positions]
        a = gates[at]
        f_e = forget[kids]
        h_e = h[kids]
        a += b[H:]
        if piece.arity != 0:
            first = None if piece.arity else plan.first_edge[at.start - L : at.stop - L] - kids.start
            if seen is None:
                assert piece.arity is not None
                width = piece.arity * H
                sum_h, of_f = h_e.reshape(-1, width), below[:width, :width]
            else:
                width, of_f = H, below[:, :H]
                sum_h = seen[at.start - L : at.stop - L] = _sum_children(h_e, piece.arity, first)
            a += product(sum_h, below[:width, w:])
            f_e += product(h_e.reshape(-1, width), of_f).reshape(-1, H)
            _sigmoid(f_e)
        _sigmoid(a)
        _finish_tanh(a[:, 2 * H :])
        c_m = a[:, :H] * a[:, 2 * H :]
        if piece.arity != 0:
            c_m += _sum_children(f_e * c[kids], piece.arity, first)
        c[own] = c_m
        _sigmoid(np.multiply(c_m, 2, out=tanh_c[at]))
        _finish_tanh(tanh_c[at])
        h[own] = np.multiply(a[:, H : 2 * H], tanh_c[at], out=c_m)
    assert len(forget) == E
    return _Saved(h, c, tanh_c, gates, forget, seen)


def _gradient_by_arity(d_forget: Array, d_gates: Array, h: Array, U: Array, plan: TreePlan, product: Product) -> Array:
    """N-ary: one product for all nodes with equally many children."""
    H = h.shape[1]
    w = U.shape[1]
    arities = np.unique(plan.arity)
    if len(arities) == 1 and arities[0] * H == w:
        h_n = h[: len(d_forget)].reshape(-1, w)
        return np.concatenate([product(d_forget.reshape(-1, w).T, h_n), product(d_gates.T, h_n)])
    d_U = np.zeros_like(U)
    for arity in arities.tolist():
        nodes = np.flatnonzero(plan.arity == arity)
        edges = (plan.first_edge[nodes, None] + np.arange(arity)).ravel()
        h_n = h[edges].reshape(len(nodes), -1)
        d_f_n = d_forget[edges].reshape(len(nodes), -1)
        width = arity * H
        d_U[:width, :width] += product(d_f_n.T, h_n)
        d_U[w:, :width] += product(d_gates[nodes].T, h_n)
    return d_U


def _sum_children(values: Array, arity: int | None, first: Ints | None) -> Array:
    """[e, H] to [m, H]; `first` [m] edges, where the nodes differ in their number of children."""
    if arity == 1:
        return values
    if arity == 2:
        pairs = values.reshape(-1, 2, values.shape[1])
        added: Array = pairs[:, 0] + pairs[:, 1]
        return added
    if arity is not None:
        total: Array = values.reshape(-1, arity, values.shape[1]).sum(1)
        return total
    # The fastest ragged sum of rows on a CPU: a tenth of the time of np.add.reduceat.
    positions = torch.arange(len(values), device="cpu")
    summed: Array = torch.embedding_bag(torch.from_numpy(values), positions, torch.from_numpy(first))[0].numpy()
    return summed


def _expand(values: Array, arity: int | None, parent: Ints | None) -> Array:
    """[m, H] to [e, H]: the value of its parent, for each child."""
    if arity == 1:
        return values
    if arity is not None:
        return values.repeat(arity, 0)
    assert parent is not None
    return values.take(parent, 0)


def _sigmoid(values: Array) -> None:
    """Apply it in place."""
    torch.from_numpy(values).sigmoid_()


def _finish_tanh(values: Array) -> None:
    """Turn sigmoid(2 x), in place, into tanh(x)."""
    values *= 2
    values -= 1


def _sigmoid_backward(gradients: Array, outputs: Array) -> None:
    """Find, in place, the gradients before the function, from those after it."""
    d = torch.from_numpy(gradients)
    torch.ops.aten.sigmoid_backward.grad_input(d, torch.from_numpy(outputs), grad_input=d)


def _tanh_backward(gradients: Array, outputs: Array) -> None:
    """Find them, in place, as for the sigmoid."""
    d = torch.from_numpy(gradients)
    torch.ops.aten.tanh_backward.grad_input(d, torch.from_numpy(outputs), grad_input=d)


def _activate_backward(d_h: Array, d_c: Array, gates: Array, tanh_c: Array, d_gates: Array) -> None:
    """Fill `d_gates` [m, 3H] with the gradients before the activations, complete d_c, overwrite d_h; all [m, H]."""
    H = d_h.shape[1]
    (i, o, u), (d_i, d_o, d_u) = np.hsplit(gates, 3), np.hsplit(d_gates, 3)
    np.multiply(d_h, tanh_c, out=d_o)
    d_h *= o
    _tanh_backward(d_h, tanh_c)
    d_c += d_h
    np.multiply(d_c, u, out=d_i)
    np.multiply(d_c, i, out=d_u)
    _sigmoid_backward(d_gates[:, : 2 * H], gates[:, : 2 * H])
    _tanh_backward(d_u, u)


class _LSTMCell(Cell):
    """What both have in common.

    input: W x + b, [4H]; below: U, [f rows + 3H, w]: the rows of f are H for each child, then i, o, u
    """

    def __init__(self, input_size: int, hidden_size: int, num_slots: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.input = CellLinear(input_size, 4 * hidden_size)
        width = num_slots * hidden_size
        self.below = CellLinear(width, width + 3 * hidden_size, bias=False)
        bound = hidden_size**-0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def project(self, x: Tensor) -> Tensor:
        projected: Tensor = self.input(x)
        return projected

    def forward(self, x: Tensor, children: Children) -> tuple[Tensor, Tensor]:
        return self._compute(x, children, self.below.weight)

    def _compute(self, x: Tensor, children: Children, U: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def run_batch(self, x: Tensor, plan: object) -> Tensor | None:
        assert isinstance(plan, TreePlan)
        is_own = type(self).forward is _LSTMCell.forward and type(self).project is _LSTMCell.project
        if not is_own or is_each_operation_needed():
            return None
        weights = self.input.weight, self.input.bias, self.below.weight
        is_plain = x.dtype in (torch.float32, torch.float64) and x.shape[1:] == self.input.weight.shape[1:]
        is_plain = is_plain and all(each.device.type == "cpu" and each.dtype == x.dtype for each in (x, *weights))
        is_plain = is_plain and not torch.is_autocast_enabled("cpu")
        is_plain = is_plain and not is_in_torch_dispatch_mode()  # which counts operators, and sees none of NumPy
        if plan.max_arity == 1 and plan.is_forest and (is_plain or x.device.type != "cpu"):
            return _run_chains(x, *weights, plan)  # of half precision torch has no kernel for every CPU
        if not is_plain or not plan.is_forest or not plan.num_inner:
            return None
        is_nary = self.max_arity is not None

        def compute(x: Tensor, W: Tensor, b: Tensor, U: Tensor) -> Tensor:
            pieces = plan.split_levels(MAX_NODES, by_arity=is_nary)
            return compute_plainly(partial(self._compute, U=U), plan, nn.functional.linear(x, W, b), pieces)

        outputs: Tensor = TreeLSTMFunction.apply(x, *weights, plan, is_nary, compute)  # type: ignore[no-untyped-call]
        return outputs


class ChildSumLSTMCell(_LSTMCell):
    """The child-sum Tree-LSTM, for nodes with any number of children whose order does not matter.

    x [N, D]; states h and c, each [N, H]. Source: arXiv:1503.00075, equations 2 to 8.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size, num_slots=1)

    def _compute(self, x: Tensor, children: Children, U: Tensor) -> tuple[Tensor, Tensor]:
        H = self.hidden_size
        from_x, gates = x.split([H, 3 * H], 1)
        memory: Tensor | float = 0.0
        if children:
            h, c = children.states
            of_f, of_gates = U.split([H, 3 * H])
            forget = torch.sigmoid(children.expand(from_x) + nn.functional.linear(h, of_f))  # (4)
            gates = gates + nn.functional.linear(children.sum(h), of_gates)  # (2), (3), (5), (6)
            memory = children.sum(forget * c)
        return _finish(gates, memory)


class NaryLSTMCell(_LSTMCell):
    """The N-ary Tree-LSTM, for nodes with at most `max_arity` children in an order; a missing child counts as 0.

    x [N, D]; states h and c, each [N, H]. Source: arXiv:1503.00075, equations 9 to 14.
    """

    def __init__(self, input_size: int, hidden_size: int, max_arity: int = 2) -> None:
        super().__init__(input_size, hidden_size, num_slots=max_arity)
        self.max_arity = max_arity

    def _compute(self, x: Tensor, children: Children, U: Tensor) -> tuple[Tensor, Tensor]:
        H = self.hidden_size
        from_x, gates = x.split([H, 3 * H], 1)
        memory: Tensor | float = 0.0
        if children:
            h, c = children.states
            h_m = children.stack(h).flatten(1)  # [m, a H]
            width = h_m.shape[1]
            of_f, of_gates = U[:width, :width], U[-3 * H :, :width]
            forget = torch.sigmoid(children.expand(from_x) + nn.functional.linear(h_m, of_f).view(-1, H))  # (10)
            gates = gates + nn.functional.linear(h_m, of_gates)  # (9), (11), (12)
            memory = children.sum(forget * c)
        return _finish(gates, memory)


def _finish(gates: Tensor, memory: Tensor | float) -> tuple[Tensor, Tensor]:
    """Gates i o u [m, 3H] before their functions, and what is left of the children's memory [m, H], to h and c."""
    i, o, u = gates.chunk(3, 1)
    c = torch.sigmoid(i) * torch.tanh(u) + memory
    return torch.sigmoid(o) * torch.tanh(c), c


def _run_chains(x: Tensor, W: Tensor, b: Tensor, U: Tensor, plan: TreePlan) -> Tensor:
    """Nodes with one child are steps of an LSTM from the leaf to the root: the same equations, in torch's kernel."""
    H, T = len(b) // 4, plan.num_trees
    below = torch.cat([U[:H, :H], U[-3 * H :, :H]])
    f, i, o, u = range(4)
    weights = [
        torch.cat([each.reshape(4, H, -1)[gate] for gate in (i, f, u, o)]) for each in (W, below, b.unsqueeze(1))
    ]
    parameters = [weights[0], weights[1], weights[2].squeeze(1), torch.zeros_like(b)]
    options = parameters, True, 1, 0.0, False, False, False  # with biases, one layer, as in training, one direction
    num_steps, rest = divmod(plan.num_nodes, T)
    if not rest and plan.num_levels == num_steps:  # all of one length: both orders are step by step, chain by chain
        zeros = x.new_zeros(1, T, H)
        steps, *_ = torch.lstm(x.reshape(num_steps, T, -1), (zeros, zeros), *options)
        return steps.reshape(plan.num_nodes, H)
    chains = plan.chain_buckets  # not packed: on a CPU the backward pass of that takes quadratic time
    outputs = []
    for group in chains.groups:
        positions, zeros = torch.from_numpy(group).to(x.device), x.new_zeros(1, group.shape[1], H)
        steps, *_ = torch.lstm(
            x.index_select(0, positions.flatten()).view(*positions.shape, -1), (zeros, zeros), *options
        )
        outputs.append(steps.flatten(0, 1))
    return torch.cat(outputs).index_select(0, torch.from_numpy(chains.slots).to(x.device))
