"""Trying what becomes of a model when layers are split: the evidence behind a tensor plan.

Everything here runs the model in evaluation mode, without gradients, on a few samples, in this process alone, and
leaves it as it was. Called by `tensor_plan`.
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

from shoal.errors import summarize_error
from shoal.parallel.layers.dropout import mix_seed
from shoal.parallel.tensor.dataflow import find_lost_gradient, find_shared_randomness
from shoal.parallel.tensor.trace import SHAPE_ERRORS, ModelTrace, Pair, eval_trace_mode, is_close, max_magnitude


@dataclass(frozen=True)
class PairSplit:
    """A pair that may be split.

    changes:  (module, attribute) -> its value where a part is held: numbers of heads
    dropouts: those that see a part of the features -> the dimension of these
    """

    pair: Pair
    changes: dict[tuple[str, str], int]
    dropouts: dict[str, int]


def verify_pair(trace: ModelTrace, pair: Pair, size: int) -> PairSplit | str:
    """Whether the pair may be split `size` ways, and what must change besides; if not, the reason."""
    if (problem := find_lost_gradient(trace, pair) or find_shared_randomness(trace, pair)) is not None:
        return problem
    ancestor = _find_common_module(trace, pair.names)
    whole = _PairRun(trace.call_counts[pair.row.name])
    try:
        _run_pair(whole, trace, ancestor, pair, {})
    except SHAPE_ERRORS as error:
        return f"what follows it cannot be tried ({summarize_error(error, max_chars=100)})"
    reason = ""
    for changes in _iter_changes(trace.model, ancestor, pair, size):
        parts = [whole.make_part(index, size) for index in range(size)]
        try:
            for part in parts:
                _run_pair(part, trace, ancestor, pair, changes)
        except SHAPE_ERRORS as error:
            reason = reason or f"a part of it does not fit what follows ({summarize_error(error, max_chars=100)})"
            continue
        if (mix := _find_mixing(whole, parts)) is None:
            return PairSplit(pair, changes, _find_split_dropouts(trace, parts[0].shapes, size))
        reason = reason or mix.format(f"what lies between {pair.columns[0].name} and {pair.row.name}")
    return reason


class _StopForward(Exception):
    """The row layer has been called as often as it is: the rest of the module need not run."""


@dataclass
class _PairRun:
    """What passes through a pair when what holds it is run: all features, or one part of them.

    What the first layers give is made up. What they compute may be zeros, as of fresh weights, which show nothing; for
    the same reason it is what the last layer is given that counts, and not what it makes of that.

    num_calls: of the row layer, in all of the model
    given:     by each column layer, at each of its calls
    taken:     by the row layer, at each of its calls
    shapes:    that dropout layers were given on the way
    """

    num_calls: int
    whole: _PairRun | None = None
    index: int = 0
    size: int = 1
    column_outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    row_inputs: list[Tensor] = field(default_factory=list)
    shapes: dict[str, torch.Size] = field(default_factory=dict)

    def make_part(self, index: int, size: int) -> _PairRun:
        return _PairRun(self.num_calls, self, index, size)

    def substitute_output(self, name: str, computed: Tensor) -> Tensor:
        """What a column layer gives instead of what it has computed."""
        calls = self.column_outputs.setdefault(name, [])
        if self.whole is None:
            generator = torch.Generator().manual_seed(mix_seed(crc32(name.encode()), len(calls)))
            made = torch.randn(computed.shape, generator=generator, dtype=torch.float32)
            calls.append(made.to(computed))
        else:
            calls.append(self.whole.column_outputs[name][len(calls)].chunk(self.size, -1)[self.index])
        return calls[-1].clone()

    def record_input(self, entering: Tensor) -> Tensor:
        """What the row layer works on instead of what enters it: all of the features."""
        self.row_inputs.append(entering.clone())
        if len(self.row_inputs) == self.num_calls:
            raise _StopForward
        return entering if self.whole is None else self.whole.row_inputs[len(self.row_inputs) - 1].clone()


def _run_pair(
    passage: _PairRun, trace: ModelTrace, ancestor: str, pair: Pair, changes: dict[tuple[str, str], int]
) -> None:
    """Run what holds the pair, with `changes`. Raises one of MISFITS when it does not fit."""

    def giving(name: str) -> Callable[..., Tensor]:
        return lambda module, args, output: passage.substitute_output(name, output)

    def noting(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Tensor) -> None:
            passage.shapes.setdefault(name, output.shape)

        return note

    args, kwargs = copy.deepcopy(trace.first_arguments[ancestor])
    with eval_trace_mode(trace.model), ExitStack() as undo:  # each begins with the same random numbers
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


def _find_mixing(whole: _PairRun, parts: list[_PairRun]) -> str | None:
    """Why what the row layer is given in parts is not what it is given whole; None when it is."""
    for part in parts:
        if len(part.row_inputs) != len(whole.row_inputs):
            return "{} is passed another number of times by a part"
        for found, taken in zip(part.row_inputs, whole.row_inputs, strict=True):
            expected = taken.chunk(part.size, -1)[part.index]
            if found.shape != expected.shape:
                return "{} gives a part another shape"
            if max_magnitude(taken) == 0.0:
                return "{} gives nothing but zeros, which prove nothing"
            if not is_close(found, expected, max_magnitude(taken)):
                return "{} mixes the parts"
    return None


def _find_common_module(trace: ModelTrace, names: list[str]) -> str:
    """The smallest module that was called and holds all of these."""
    common = names[0]
    while common not in trace.first_arguments or not all(name.startswith(f"{common}.") or not common for name in names):
        common = common.rpartition(".")[0]
    return common


def _iter_changes(model: nn.Module, ancestor: str, pair: Pair, size: int) -> Iterator[dict[tuple[str, str], int]]:
    """What may have to change along with the pair: nothing; numbers of heads; and widths that heads make up."""
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


def _find_split_dropouts(trace: ModelTrace, shapes: dict[str, torch.Size], size: int) -> dict[str, int]:
    split = {}
    for name, shape in shapes.items():
        whole = trace.dropouts[name]
        differing = [dim for dim, (part, full) in enumerate(zip(shape, whole, strict=True)) if part != full]
        if differing:
            split[name] = differing[0]
    return split
