"""Finds uses of the parts of a split layer other than their sum.

Called by `verify` for one pair, and by `plan` for all chosen pairs. Leaves the model unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.checkpoint import CheckpointFunction

from shoal.batch_tree import tensors_of
from shoal.parallel.state.module_snapshot import preserve_module
from shoal.parallel.tensor.trace import (
    SHAPE_ERRORS,
    ModelTrace,
    Pair,
    eval_trace_mode,
    is_close,
    max_magnitude,
    train_trace_mode,
)


def find_entering_parameters(trace: ModelTrace, pair: Pair) -> frozenset[str] | str:
    """The parameters that enter between the layers, which a rank runs in part: their gradient is the sum over ranks.

    Or why the layers cannot be split: another tensor enters that needs a gradient. Walks the graph of a training step
    from each call of the second layer back to the first ones. It may have no node that hides its inputs.
    """
    columns = {call.name for call in pair.columns}
    stops = {call.output_node for call in trace.training_calls if call.name in columns}
    rows = [call for call in trace.training_calls if call.name == pair.row.name]
    trains = any(each.requires_grad for call in (*pair.columns, pair.row) for each in call.module.parameters())
    between = f"between {pair.columns[0].name} and {pair.row.name}"
    if not rows or not columns <= {call.name for call in trace.training_calls}:
        return f"{pair.columns[0].name} or {pair.row.name} is not called in training"
    if trains and not all(call.has_gradients for call in trace.training_calls if call.name in pair.names):
        return f"what happens {between} cannot be seen: they are called without gradients, or recomputed reentrantly"
    names = {id(parameter): name for name, parameter in trace.model.named_parameters()}
    entering = set[str]()
    for call in rows:
        for node in _walk_back(call.input_node, stops):
            if getattr(node, "_forward_cls", None) is CheckpointFunction:
                return f"what happens {between} cannot be seen: it is recomputed reentrantly"
            if hasattr(node, "variable"):
                if id(node.variable) not in names:
                    return f"a tensor that is no parameter enters {between}, where it gets the gradient of one part"
                entering.add(names[id(node.variable)])
    owned = {name for name in entering if name.rpartition(".")[0] in pair.names}
    return f"{min(owned)} enters {between}" if owned else frozenset(entering)


def find_shared_randomness(trace: ModelTrace, pair: Pair) -> str | None:
    """Random draws between the layers: all ranks would draw the same for their parts, unlike one process.

    Dropout layers are exempt: their masks are parts of one mask.
    """
    since: int | None = None
    for call in trace.training_calls:
        if call.name == pair.columns[0].name:
            since = call.drawn_after
        elif call.name == pair.row.name and since not in (None, call.drawn_before):
            between = f"between {pair.columns[0].name} and {pair.row.name}"
            return f"random numbers are drawn {between}, and not by a dropout layer: each part would get the same ones"
    return None


def _walk_back(node: Node | None, stops: set[Node | None]) -> Iterator[Node]:
    """The nodes behind `node`, itself included, up to `stops`."""
    seen = set(stops)
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [each for each, _ in node.next_functions]


def is_activation_used_elsewhere(trace: ModelTrace, pairs: Sequence[Pair], entering: Iterable[str] = ()) -> bool:
    """Whether values between the layers of these pairs are used elsewhere, in training or evaluation.

    entering: parameters that are used between them

    The outputs of the first layers and these parameters are made NaN, and those of the second ones are replaced by
    their earlier outputs, at every call: NaN in the model's output, in the loss, or at another split layer shows a use.
    So does any other change: counting or comparing does not pass NaN on.
    """
    for mode in (train_trace_mode, eval_trace_mode):
        unsharded = _MaskedRun(trace, pairs)
        with preserve_module(trace.model), mode(trace.model):
            expected = unsharded.run()
        hidden = _MaskedRun(trace, pairs, unsharded, tuple(entering))
        try:
            with preserve_module(trace.model), mode(trace.model):
                found = hidden.run()
        except SHAPE_ERRORS:
            return True
        if hidden.nan_inputs != unsharded.nan_inputs or len(found) != len(expected):
            return True
        if not all(is_close(each, before, max_magnitude(before)) for each, before in zip(found, expected, strict=True)):
            return True
    return False


class _MaskedRun:
    """A run of a model; with values between the layers of some pairs hidden, if there is a run to compare with.

    gave:        the outputs of each row layer, at each of its calls
    entered_nan: for each call of a column layer: whether its input had NaN
    """

    def __init__(
        self,
        trace: ModelTrace,
        pairs: Sequence[Pair],
        unsharded: _MaskedRun | None = None,
        entering: Sequence[str] = (),
    ) -> None:
        self._trace = trace
        self._pairs = pairs
        self._reference = unsharded
        self._entering = entering
        self.row_outputs: dict[str, list[Tensor]] = {pair.row.name: [] for pair in pairs}
        self.nan_inputs: list[bool] = []

    def run(self) -> list[Tensor]:
        """The model's output, and the loss."""
        with ExitStack() as undo:
            for pair in self._pairs:
                for call in pair.columns:
                    undo.callback(call.module.register_forward_hook(self._leave_column, prepend=True).remove)
                leave_row = partial(self._leave_row, pair.row.name)
                undo.callback(pair.row.module.register_forward_hook(leave_row, prepend=True).remove)
            for name in self._entering:
                path, _, attribute = name.rpartition(".")
                owner = self._trace.model.get_submodule(path)
                undo.callback(owner._parameters.__setitem__, attribute, owner._parameters[attribute])
                owner._parameters[attribute] = _make_nan(getattr(owner, attribute))
            output = self._trace.model(*self._trace.inputs)
        try:
            loss = [self._trace.loss(output)]
        except SHAPE_ERRORS:  # the loss is undefined for so few samples
            loss = []
        return [each.detach().clone() for each in (*tensors_of(output), *loss)]

    def _leave_column(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        self.nan_inputs.append(any(bool(each.isnan().any()) for each in args))
        return None if self._reference is None else output * math.nan

    def _leave_row(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        outputs = self.row_outputs[name]
        outputs.append(output.detach().clone())
        return None if self._reference is None else self._reference.row_outputs[name][len(outputs) - 1].clone()


def is_weight_used_elsewhere(trace: ModelTrace, names: list[str]) -> bool:
    """Whether the weights of these layers are used outside their own calls, where a part would be wrong.

    Outside their calls they are made NaN; a use shows in the output.
    """
    with eval_trace_mode(trace.model), ExitStack() as undo:
        for module in map(trace.model.get_submodule, names):
            real = dict(module._parameters)
            closed = {name: None if each is None else _make_nan(each) for name, each in real.items()}
            undo.callback(module._parameters.update, real)
            undo.callback(module.register_forward_pre_hook(_make_swap(module, real)).remove)
            undo.callback(module.register_forward_hook(_make_swap(module, closed)).remove)
            module._parameters.update(closed)
        try:
            output = trace.model(*trace.inputs)
        except SHAPE_ERRORS:
            return True
    pairs = zip(_float_tensors(output), _float_tensors(trace.output), strict=True)
    return any(not torch.equal(each.isnan(), before.isnan()) for each, before in pairs)


def _float_tensors(output: Any) -> list[Tensor]:
    return [each for each in tensors_of(output) if each.is_floating_point()]


def _make_swap(module: nn.Module, parameters: dict[str, nn.Parameter | None]) -> Callable[..., None]:
    """A hook by which the module has these parameters."""
    return lambda *_: module._parameters.update(parameters)


def _make_nan(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.new_full((), torch.nan).expand(parameter.shape), False)
