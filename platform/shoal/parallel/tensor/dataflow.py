"""Where the parts of a split layer would be seen, or do something, besides where they add up.

Called by `tensor_trial` for one pair, and by `tensor_plan` for all that it has chosen. Leaves the model as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
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


def find_lost_gradient(trace: ModelTrace, pair: Pair) -> str | None:
    """What would get the gradient of one part only: it comes from between the layers, which a rank does in part.

    The graph of a training step is walked from each call of the second layer back to the first ones. Nothing else may
    be at its ends, and nothing in it may hide what it is made of.
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
    for call in rows:
        for node in _walk_back(call.input_node, stops):
            if getattr(node, "_forward_cls", None) is CheckpointFunction:
                return f"what happens {between} cannot be seen: it is recomputed reentrantly"
            if hasattr(node, "variable"):
                what = names.get(id(node.variable), "a tensor that is no parameter")
                return f"{what} enters {between}, where it would get the gradient of one part only"
    return None


def find_shared_randomness(trace: ModelTrace, pair: Pair) -> str | None:
    """What is random between the layers: all ranks would draw the same for their parts, and not what one process draws.

    Dropout layers are another matter: their masks are parts of one mask.
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
    """The nodes behind `node`, itself included, as far as `stops`."""
    seen = set(stops)
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [each for each, _ in node.next_functions]


def is_activation_used_elsewhere(trace: ModelTrace, pairs: Sequence[Pair]) -> bool:
    """Whether what lies between the layers of these pairs is used anywhere else, in training or evaluation.

    What the first layers give is made NaN, and what the second ones give is what they gave before, at every call: NaN
    in what the model gives, in the loss, or before another layer that is split tells that it is. So does any other
    change: what counts or compares does not pass NaN on.
    """
    for mode in (train_trace_mode, eval_trace_mode):
        whole = _MaskedRun(trace, pairs)
        with preserve_module(trace.model), mode(trace.model):
            expected = whole.run()
        hidden = _MaskedRun(trace, pairs, whole)
        try:
            with preserve_module(trace.model), mode(trace.model):
                found = hidden.run()
        except SHAPE_ERRORS:
            return True
        if hidden.nan_inputs != whole.nan_inputs or len(found) != len(expected):
            return True
        if not all(is_close(each, before, max_magnitude(before)) for each, before in zip(found, expected, strict=True)):
            return True
    return False


class _MaskedRun:
    """A run of a model; with what was between the layers of some pairs hidden, when there is a run to compare with.

    gave:        by each row layer, at each of its calls
    entered_nan: of each call of a column layer: whether there was NaN in its input
    """

    def __init__(self, trace: ModelTrace, pairs: Sequence[Pair], whole: _MaskedRun | None = None) -> None:
        self._trace, self._pairs, self._reference = trace, pairs, whole
        self.row_outputs: dict[str, list[Tensor]] = {pair.row.name: [] for pair in pairs}
        self.nan_inputs: list[bool] = []

    def run(self) -> list[Tensor]:
        """What the model gives, and the loss."""
        with ExitStack() as undo:
            for pair in self._pairs:
                for call in pair.columns:
                    undo.callback(call.module.register_forward_hook(self._column_hook, prepend=True).remove)
                row = self._make_row_hook(self.row_outputs[pair.row.name], pair.row.name)
                undo.callback(pair.row.module.register_forward_hook(row, prepend=True).remove)
            output = self._trace.model(*self._trace.inputs)
        try:
            loss = [self._trace.loss(output)]
        except SHAPE_ERRORS:  # a loss that cannot be had of so few samples tells nothing
            loss = []
        return [each.detach().clone() for each in (*tensors_of(output), *loss)]

    def _column_hook(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        self.nan_inputs.append(any(bool(each.isnan().any()) for each in args))
        return None if self._reference is None else output * math.nan

    def _make_row_hook(self, gave: list[Tensor], name: str) -> Callable[..., Tensor | None]:
        def leaving(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            gave.append(output.detach().clone())
            return None if self._reference is None else self._reference.row_outputs[name][len(gave) - 1].clone()

        return leaving


def is_weight_used_elsewhere(trace: ModelTrace, names: list[str]) -> bool:
    """Whether the weights of these layers are used outside their own calls, where a part would not do.

    Outside their calls they are made NaN; a weight that is used shows in the output.
    """
    with eval_trace_mode(trace.model), ExitStack() as undo:
        for name in names:
            _hide_weights(trace.model.get_submodule(name), undo)
        try:
            output = trace.model(*trace.inputs)
        except SHAPE_ERRORS:
            return True
    pairs = zip(_float_tensors(output), _float_tensors(trace.output), strict=True)
    return any(not torch.equal(each.isnan(), before.isnan()) for each, before in pairs)


def _float_tensors(output: Any) -> list[Tensor]:
    return [each for each in tensors_of(output) if each.is_floating_point()]


def _hide_weights(module: nn.Module, undo: ExitStack) -> None:
    """Let `module` have its weights during its own calls only."""
    real = dict(module._parameters)
    closed = {
        name: None if each is None else nn.Parameter(each.new_full((), torch.nan).expand(each.shape), False)
        for name, each in real.items()
    }
    undo.callback(module._parameters.update, real)
    undo.callback(module.register_forward_pre_hook(lambda *_: module._parameters.update(real)).remove)
    undo.callback(module.register_forward_hook(lambda *_: module._parameters.update(closed)).remove)
    module._parameters.update(closed)
