"""Runs a cell over a batch of trees or DAGs: as one function of autograd, level by level.

Owns the choice of the way: the cell's own (`Cell.run_batch`), or one call of the cell for each level. The states of all
nodes lie in one buffer each; a level reads its children as a slice and writes its own rows. Gradients of the states are
buffers too, so autograd never joins or adds levels. Called by models. Legend: see `cell`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shoal.differentiation import (
    ForwardState,
    differentiate_plainly,
    has_saved_tensor_hooks,
    is_each_operation_needed,
    is_plain_backward_needed,
)
from shoal.errors import TreeError
from shoal.libs.trees.batch import TreeBatch
from shoal.libs.trees.cell import Cell, Children, compute_level, compute_level_compiled
from shoal.libs.trees.plain_levels import check_states, compute_plainly
from shoal.libs.trees.plan import Piece, TreePlan

MAX_NODES = 2048  # of one call of a cell: bounds the memory of a level


class TreeRNN(nn.Module):
    """`cell` over trees: from features of all nodes [N, D] in input order to outputs [N, S] in output order.

        rnn = TreeRNN(ChildSumLSTMCell(input_size=64, hidden_size=150))
        h = rnn(embedding(trees.inputs["token"]), trees)
        h_root = trees.roots(h)

    compile: run a cell that has no `run_batch` through torch.compile, a few graphs for all batches.
             Compiling takes seconds for each. Measure: on one CPU the cell of a Tree-LSTM gained 5%, and one of
             matrix products lost half. Each forward pass is differentiated once

    Differentiable by x and by the cell's parameters, any number of times, and by torch.func. What is not a first
    gradient is computed in plain torch, which takes longer.
    """

    is_one_block: ClassVar = True  # for FSDP: a rank calls the cell's layers once for each level of its own trees

    def __init__(self, cell: Cell, *, compile: bool = False) -> None:
        super().__init__()
        self.cell, self.compile_cell = cell, compile

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a graph for each shape of a batch: see docs/libs/trees.md
    def forward(self, x: Tensor, trees: TreeBatch) -> Tensor:
        """Raises TreeError for a node with more children than the cell takes, and for another number of nodes."""
        plan, cell = trees.plan, self.cell
        if len(x) != plan.num_nodes:
            raise TreeError(None, None, f"has {plan.num_nodes} nodes, and x has {len(x)} rows")
        if cell.max_arity is not None and plan.max_arity > cell.max_arity:
            inner = int((plan.arity > cell.max_arity).argmax())
            number = int(plan.order[plan.num_leaves + inner])
            tree = int(plan.tree_of_node[number])
            problem = f"has {plan.arity[inner]} children, and the cell takes at most {cell.max_arity}"
            raise TreeError(tree, number - int(plan.first_node[tree]), problem)
        if (outputs := cell.run_batch(x, plan)) is not None:
            return outputs
        x = cell.project(x)
        levels = _Levels(cell, plan, x.device, self.compile_cell)
        if is_each_operation_needed() or has_saved_tensor_hooks():  # a tape would pass none of its tensors to them
            return compute_plainly(cell, plan, x, levels.pieces)
        parameters = {name: parameter for name, parameter in cell.named_parameters() if parameter.requires_grad}
        if torch.is_grad_enabled() and (x.requires_grad or parameters):
            arguments = (levels, [*parameters], x, *parameters.values())
            differentiable: Tensor = _LevelFunction.apply(*arguments)  # type: ignore[no-untyped-call]
            return differentiable
        with torch.no_grad():
            return levels.run(x)[0]


class _Levels:
    """The pieces of a plan, with indices on the device."""

    def __init__(self, cell: Cell, plan: TreePlan, device: torch.device, is_compiled: bool) -> None:
        self.cell = cell
        self.plan = plan
        self.is_compiled = is_compiled
        self._compute = compute_level_compiled if is_compiled else compute_level
        self.pieces = plan.split_levels(MAX_NODES, by_arity=cell.max_arity is not None)
        self._row = _to_device(plan.row, device) if plan.is_forest else None
        self._child_row = None if plan.child_row is None else _to_device(plan.child_row, device)
        self._edge_parent = _to_device(plan.edge_parent, device)

    def run(self, x: Tensor, tape: list[Any] | None = None) -> list[Tensor]:
        """The buffers of the states; with a tape, each piece's (x, states of its children, states) for gradients."""
        buffers: list[Tensor] = []
        for piece in self.pieces:
            x_m = x[piece.positions].detach()
            below = [] if piece.arity == 0 else [self.read_children(buffer, piece) for buffer in buffers]
            if tape is not None:
                x_m.requires_grad_(x.requires_grad)
                for state in below:
                    state.requires_grad_(state.is_floating_point())
            # How many children each node has, or else the parent of each child, within the piece. A compiled cell has
            # one graph for all numbers of children.
            arity, parent = piece.arity, None
            if arity is None or (arity and self.is_compiled and self.cell.max_arity is None):
                arity, parent = None, self._edge_parent[piece.edges] - (piece.positions.start - self.plan.num_leaves)
            with torch.set_grad_enabled(tape is not None):
                states = self._compute(self.cell, x_m, below, len(x_m), arity, parent)
            check_states(self.cell, states, len(x_m))
            if not buffers:
                buffers = [state.new_empty(self.plan.num_nodes, *state.shape[1:]) for state in states]
            for buffer, state in zip(buffers, states, strict=True):
                self.write(buffer, piece, state.detach())
            if tape is not None:
                tape.append((x_m, below, states))
        return buffers

    def read_children(self, buffer: Tensor, piece: Piece) -> Tensor:
        if self._child_row is None:
            return buffer[piece.edges].data  # unlike `detach`, it may be kept while other rows are written
        return buffer.index_select(0, self._child_row[piece.edges])

    def write(self, buffer: Tensor, piece: Piece, values: Tensor) -> None:
        if self._row is None:
            buffer[piece.positions] = values
        else:  # autocast may give a level another data type
            buffer.index_copy_(0, self._row[piece.positions], values.to(buffer.dtype))

    def read_own(self, buffer: Tensor, piece: Piece) -> Tensor:
        return buffer[piece.positions] if self._row is None else buffer.index_select(0, self._row[piece.positions])

    def add_to_children(self, gradients: Tensor, piece: Piece, values: Tensor) -> None:
        if self._child_row is None:
            gradients[piece.edges] += values
        else:
            gradients.index_add_(0, self._child_row[piece.edges], values.to(gradients.dtype))


def _to_device(indices: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(indices).to(device)


class _LevelFunction(torch.autograd.Function):
    """(levels, names of parameters, x [N, P], parameters of the cell) to the outputs [N, S] in output order."""

    @staticmethod
    def forward(ctx: Any, levels: _Levels, names: list[str], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.state = ForwardState(x.device)
        ctx.names = names
        ctx.inputs = (x, *parameters)
        ctx.tape, ctx.levels = [], levels
        buffers = levels.run(x, ctx.tape)
        ctx.shapes = [buffer.shape for buffer in buffers]
        ctx.save_for_backward(buffers[0])  # it is also in the tape: backward refuses it if it was changed
        return buffers[0]

    @staticmethod
    def backward(ctx: Any, grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        levels: _Levels = ctx.levels
        (outputs,) = ctx.saved_tensors
        if is_plain_backward_needed(grad_outputs):
            compute = partial(_compute_again, levels, ctx.names, ctx.state, outputs.detach())
            return None, None, *differentiate_plainly(compute, ctx.inputs, ctx.needs_input_grad[2:], grad_outputs)
        tape, (x, *parameters) = ctx.tape, ctx.inputs
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.tape = ctx.inputs = None  # a loss that is kept until the next step would keep it
        zeros = [states.new_zeros(shape) for states, shape in zip(tape[0][2], ctx.shapes, strict=True)]
        d_states = [grad_outputs.clone(), *zeros[1:]]
        d_x = grad_outputs.new_zeros(x.shape, dtype=x.dtype) if ctx.needs_input_grad[2] else None
        d_parameters = _Sums(len(parameters))
        for piece, (x_m, below, states) in zip(reversed(levels.pieces), reversed(tape), strict=True):
            pairs = [
                (state, levels.read_own(d_state, piece).to(state.dtype))
                for state, d_state in zip(states, d_states, strict=True)
                if state.requires_grad
            ]
            if not pairs:
                continue
            outputs_m, gradients = zip(*pairs, strict=True)
            into = [(d_state, state) for d_state, state in zip(d_states, below, strict=False) if state.requires_grad]
            wanted = [*parameters, *(state for _, state in into), *([] if d_x is None else [x_m])]
            retain = not levels.is_compiled
            slopes = torch.autograd.grad(outputs_m, wanted, gradients, retain_graph=retain, allow_unused=True)
            d_parameters.add(slopes[: len(parameters)])
            for (d_state, _), d_child in zip(into, slopes[len(parameters) :], strict=False):
                if d_child is not None:
                    levels.add_to_children(d_state, piece, d_child)
            if d_x is not None and slopes[-1] is not None:
                d_x[piece.positions] = slopes[-1]
        return None, None, d_x, *d_parameters.totals


def _compute_again(
    levels: _Levels, names: list[str], state: ForwardState, expected: Tensor, x: Tensor, *parameters: Tensor
) -> Tensor:
    """The outputs by plain operations. Raises TreeError if they are not those of the first time."""
    buffers = {name: buffer.clone() for name, buffer in levels.cell.named_buffers()}  # a forward may change them
    tensors = {**buffers, **dict(zip(names, parameters, strict=True))}
    with state.restore():

        def forward(x: Tensor, children: Children) -> Any:
            return torch.func.functional_call(levels.cell, tensors, (x, children))

        outputs = compute_plainly(forward, levels.plan, x, levels.pieces)
    tolerance = torch.finfo(expected.dtype).eps ** 0.5
    largest = float(expected.abs().amax()) if expected.numel() else 0.0
    if not torch.allclose(outputs, expected, rtol=tolerance, atol=tolerance * largest, equal_nan=True):
        problem = f"{type(levels.cell).__name__} is computed again for second derivatives, and its outputs are others"
        raise TreeError(
            None, None, problem, "change neither inputs, parameters, mode nor state of a cell before backward"
        )
    return outputs


class _Sums:
    """The gradients of the parameters, added over the pieces."""

    def __init__(self, count: int) -> None:
        self.totals: list[Tensor | None] = [None] * count
        self._is_own = [False] * count  # a first gradient may be one tensor for two parameters

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        for index, gradient in enumerate(gradients):
            total = self.totals[index]
            if gradient is None or total is None:
                self.totals[index] = total if gradient is None else gradient
            elif self._is_own[index]:
                total.add_(gradient)
            else:
                self.totals[index], self._is_own[index] = total + gradient, True
