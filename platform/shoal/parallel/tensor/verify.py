"""Tries a split of layers on a model: the evidence for a tensor plan.

Everything here runs the model in evaluation mode, without gradients, on a few samples, in this process alone, and
leaves it unchanged. Called by `plan`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shoal.errors import summarize_error
from shoal.parallel.layers.dropout import mix_seed
from shoal.parallel.tensor.dataflow import find_entering_parameters, find_shared_randomness
from shoal.parallel.tensor.trace import SHAPE_ERRORS, ModelTrace, Pair, eval_trace_mode, is_close, max_magnitude


@dataclass(frozen=True)
class PairSplit:
    """A pair that may be split.

    changes:  (module, attribute) -> its value for a part: numbers of heads
    dropouts: those with a part of the features -> the dimension of these
    entering: parameters that are used between the layers: each part has a part of their gradient
    """

    pair: Pair
    changes: dict[tuple[str, str], int]
    dropouts: dict[str, int]
    entering: frozenset[str]


def verify_pair(trace: ModelTrace, pair: Pair, size: int) -> PairSplit | str:
    """Whether the pair may be split `size` ways, and the required changes; if not, the reason."""
    entering = find_entering_parameters(trace, pair)
    if isinstance(entering, str):
        return entering
    if (problem := find_shared_randomness(trace, pair)) is not None:
        return problem
    ancestor = pair.names[0]  # the smallest called module that contains all layers of the pair
    while ancestor not in trace.first_arguments or not all(
        name.startswith(f"{ancestor}.") or not ancestor for name in pair.names
    ):
        ancestor = ancestor.rpartition(".")[0]
    has_no_values = isinstance(pair.row.module.weight, FakeTensor)  # then all parts are alike
    unsharded = _PairRun(trace.call_counts[pair.row.name])
    try:
        _run_pair(unsharded, trace, ancestor, pair, {})
    except SHAPE_ERRORS as error:
        return f"what follows it cannot be tried ({summarize_error(error, max_chars=100)})"
    reason = ""
    for changes in _iter_changes(trace.model, ancestor, pair, size):
        num_parts = 1 if has_no_values else size
        parts = [_PairRun(unsharded.num_calls, unsharded, index, size) for index in range(num_parts)]
        try:
            for part in parts:
                _run_pair(part, trace, ancestor, pair, changes)
        except SHAPE_ERRORS as error:
            reason = reason or f"a part of it does not fit what follows ({summarize_error(error, max_chars=100)})"
            continue
        if (mix := _find_mixing(unsharded, parts)) is None:
            dropouts = {}
            for name, shape in parts[0].shapes.items():
                pairs = zip(shape, trace.dropouts[name], strict=True)
                if differing := [dim for dim, (part, full) in enumerate(pairs) if part != full]:
                    dropouts[name] = differing[0]
            return PairSplit(pair, changes, dropouts, entering)
        reason = reason or mix.format(f"what lies between {pair.columns[0].name} and {pair.row.name}")
    return reason


class _StopForward(Exception):
    """The row layer has had all its calls: the rest of the module need not run."""


@dataclass
class _PairRun:
    """The tensors in a pair while its enclosing module runs: all features, or one part of them.

    The outputs of the first layers are made up, since real ones may be zeros, as of fresh weights, which prove nothing.
    For the same reason the input of the last layer is compared, and not its output.

    num_calls: of the row layer, in the full model
    given:     the outputs of each column layer, at each of its calls
    taken:     the inputs of the row layer, at each of its calls
    shapes:    the inputs of dropout layers in between
    """

    num_calls: int
    unsharded: _PairRun | None = None
    index: int = 0
    size: int = 1
    column_outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    row_inputs: list[Tensor] = field(default_factory=list)
    shapes: dict[str, torch.Size] = field(default_factory=dict)

    def substitute_output(self, name: str, computed: Tensor) -> Tensor:
        """Replace the output of a column layer."""
        calls = self.column_outputs.setdefault(name, [])
        if self.unsharded is None:
            generator = torch.Generator().manual_seed(mix_seed(crc32(name.encode()), len(calls)))
            made = torch.randn(computed.shape, generator=generator, dtype=torch.float32)
            calls.append(made.to(computed))
        else:
            calls.append(self.unsharded.column_outputs[name][len(calls)].chunk(self.size, -1)[self.index])
        return calls[-1].clone()

    def record_input(self, entering: Tensor) -> Tensor:
        """Replace the input of the row layer by all of the features."""
        self.row_inputs.append(entering.clone())
        if len(self.row_inputs) == self.num_calls:
            raise _StopForward
        return entering if self.unsharded is None else self.unsharded.row_inputs[len(self.row_inputs) - 1].clone()


def _run_pair(
    passage: _PairRun, trace: ModelTrace, ancestor: str, pair: Pair, changes: dict[tuple[str, str], int]
) -> None:
    """Run the enclosing module, with `changes`. Raises one of MISFITS when they do not fit."""

    def giving(name: str) -> Callable[..., Tensor]:
        return lambda module, args, output: passage.substitute_output(name, output)

    def noting(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Tensor) -> None:
            passage.shapes.setdefault(name, output.shape)

        return note

    args, kwargs = copy.deepcopy(trace.first_arguments[ancestor])
    with eval_trace_mode(trace.model), ExitStack() as undo:  # each starts with the same random state
        for call in pair.columns:
            undo.callback(call.module.register_forward_hook(giving(call.name), prepend=True).remove)
        undo.callback(
            pair.row.module.register_forward_pre_hook(lambda _, args: (passage.record_input(args[0]),)).remove
        )
        for name in trace.dropouts:
            undo.callback(trace.model.get_submodule(name).register_forward_hook(noting(name)).remove)
        for (owner, attribute), value in changes.items():
            holder = trace.model.get_submodule(owner)
            undo.callback(setattr, holder, attribute, getattr(holder, attribute))
            setattr(holder, attribute, value)
        with suppress(_StopForward):
            trace.model.get_submodule(ancestor)(*args, **kwargs)
    if not passage.row_inputs:
        raise RuntimeError("the second layer is not called after the first ones")


def _find_mixing(unsharded: _PairRun, parts: list[_PairRun]) -> str | None:
    """Why the parts of the row layer's input differ from its full input; None if they agree."""
    for part in parts:
        if len(part.row_inputs) != len(unsharded.row_inputs):
            return "{} is passed another number of times by a part"
        for found, taken in zip(part.row_inputs, unsharded.row_inputs, strict=True):
            expected = taken.chunk(part.size, -1)[part.index]
            if found.shape != expected.shape:
                return "{} gives a part another shape"
            if max_magnitude(taken) == 0.0:
                return "{} gives nothing but zeros, which prove nothing"
            if not is_close(found, expected, max_magnitude(taken)):
                return "{} mixes the parts"
    return None


def _iter_changes(model: nn.Module, ancestor: str, pair: Pair, size: int) -> Iterator[dict[tuple[str, str], int]]:
    """The changes that may be needed with the pair: none; numbers of heads; and widths that heads make up."""
    yield {}
    widths = {call.module.out_features for call in pair.columns}
    heads: dict[tuple[str, str], int] = {}
    sizes: dict[tuple[str, str], int] = {}
    for name, module in model.get_submodule(ancestor).named_modules(prefix=ancestor):
        for attribute, value in vars(module).items():
            if type(value) is not int or value % size or attribute in ("in_features", "out_features"):
                continue
            if "head" in attribute and not any(word in attribute for word in ("dim", "size", "width")):
                heads[name, attribute] = value // size
            elif value in widths and not isinstance(module, nn.Linear):
                sizes[name, attribute] = value // size
    if heads:
        yield heads
        yield {**heads, **sizes}
