"""Tree-LSTMs (Tai et al., arXiv:1503.00075): the child-sum one, equations 2 to 8, and the N-ary one, equations 9 to 14.

On a CPU a batch of trees is one function of autograd in NumPy (`lstm_function`); chains are handed to torch's LSTM;
otherwise the cell runs level by level. All give the same values. Legend: see `cell`; H hidden units, D features of a
node, gates in the order f i o u; w = H for child-sum, K H for N-ary with at most K children.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from shoal.differentiation import is_each_operation_needed
from shoal.libs.trees.cell import Cell, CellLinear, Children
from shoal.libs.trees.lstm_function import MAX_NODES, TreeLSTMFunction
from shoal.libs.trees.plain_levels import compute_plainly
from shoal.libs.trees.plan import TreePlan


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
    chains = plan.padded_chains  # not packed: on a CPU the backward pass of that takes quadratic time
    outputs = []
    for group in chains.groups:
        positions, zeros = torch.from_numpy(group).to(x.device), x.new_zeros(1, group.shape[1], H)
        steps, *_ = torch.lstm(
            x.index_select(0, positions.flatten()).view(*positions.shape, -1), (zeros, zeros), *options
        )
        outputs.append(steps.flatten(0, 1))
    return torch.cat(outputs).index_select(0, torch.from_numpy(chains.slots).to(x.device))
