"""Trying what becomes of a model when layers are split: the evidence behind a tensor plan.

Everything here runs the model in evaluation mode, without gradients, on a few samples, in this process alone, and
leaves it as it was. Called by `tensor_plan`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.parallel.batches import tensors_of
from shoal.parallel.tensor_trace import MISFITS, Pair, Trace, looking
from shoal.parallel.tensor_use import lost_gradient

TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the largest output; else 1e-4


@dataclass(frozen=True)
class Split:
    """A pair that may be split.

    changes:  (module, attribute) -> its value where a part is held: numbers of heads
    dropouts: those that see a part of the features -> the dimension of these
    """

    pair: Pair
    changes: dict[tuple[str, str], int]
    dropouts: dict[str, int]


def try_pair(trace: Trace, pair: Pair, size: int) -> Split | str:
    """Whether the pair may be split `size` ways, and what must change besides; if not, the reason."""
    if (lost := lost_gradient(trace, pair)) is not None:
        return lost
    ancestor = _ancestor(trace, pair.names)
    reason = ""
    for changes in _changes(trace.model, ancestor, pair, size):
        try:
            with looking(trace.model):
                parts = [_part(trace, ancestor, pair, changes, index, size) for index in range(size)]
        except MISFITS as error:
            reason = reason or f"a part of it does not fit what follows ({str(error).splitlines()[0][:100]})"
            continue
        expected = pair.row.output
        if any(output.shape != expected.shape for output, _ in parts):
            reason = reason or "a part of it gives outputs of another shape"
            continue
        difference = torch.stack([output.float() for output, _ in parts]).sum(0) - expected.float()
        if float(difference.abs().max()) <= TOLERANCE.get(expected.dtype, 1e-4) * float(expected.abs().max()):
            return Split(pair, changes, _split_dropouts(trace, parts[0][1], size))
        reason = reason or f"what lies between {pair.columns[0].name} and {pair.row.name} mixes the parts"
    return reason


def is_used_elsewhere(trace: Trace, names: list[str]) -> bool:
    """Whether the weights of these layers are used outside their own calls, where a part would not do.

    Outside their calls they are made NaN; a weight that is used shows in the output.
    """
    with looking(trace.model), ExitStack() as undo:
        for name in names:
            _gate(trace.model.get_submodule(name), undo)
        try:
            output = trace.model(*trace.inputs)
        except MISFITS:
            return True
    pairs = zip(_floats(output), _floats(trace.output), strict=True)
    return any(not torch.equal(each.isnan(), before.isnan()) for each, before in pairs)


def _floats(output: Any) -> list[Tensor]:
    return [each for each in tensors_of(output) if each.is_floating_point()]


class _Reached(Exception):
    """The row layer was called: the rest of the module need not run."""

    def __init__(self, output: Tensor) -> None:
        self.output = output


def _part(
    trace: Trace, ancestor: str, pair: Pair, changes: dict[tuple[str, str], int], index: int, size: int
) -> tuple[Tensor, dict[str, torch.Size]]:
    """Part `index` of the row layer's output, and the shapes that dropout layers were given on the way."""
    shapes: dict[str, torch.Size] = {}

    def reached(module: nn.Module, args: Any, output: Tensor) -> None:
        raise _Reached(output)

    def noted(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Tensor) -> None:
            shapes.setdefault(name, output.shape)

        return note

    module = trace.model.get_submodule(ancestor)
    args, kwargs = copy.deepcopy(trace.entered[ancestor])
    with ExitStack() as undo:
        for call in pair.columns:
            _replace(call.module, undo, call.module.weight.chunk(size)[index], _chunk(call.module.bias, index, size))
        bias = pair.row.module.bias if index == 0 else None
        _replace(pair.row.module, undo, pair.row.module.weight.chunk(size, 1)[index], bias)
        for (owner, attribute), value in changes.items():
            holder = trace.model.get_submodule(owner)
            undo.callback(setattr, holder, attribute, getattr(holder, attribute))
            setattr(holder, attribute, value)
        for name in trace.dropouts:
            undo.callback(trace.model.get_submodule(name).register_forward_hook(noted(name)).remove)
        undo.callback(pair.row.module.register_forward_hook(reached).remove)
        try:
            module(*args, **kwargs)
        except _Reached as end:
            return end.output, shapes
    raise RuntimeError("the second layer is not called after the first ones")


def _chunk(bias: Tensor | None, index: int, size: int) -> Tensor | None:
    return None if bias is None else bias.chunk(size)[index]


def _replace(module: nn.Module, undo: ExitStack, weight: Tensor, bias: Tensor | None) -> None:
    before = dict(module._parameters)
    undo.callback(module._parameters.update, before)
    module._parameters["weight"] = nn.Parameter(weight.detach(), requires_grad=False)
    module._parameters["bias"] = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)


def _gate(module: nn.Module, undo: ExitStack) -> None:
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


def _ancestor(trace: Trace, names: list[str]) -> str:
    """The smallest module that was called and holds all of these."""
    common = names[0]
    while common not in trace.entered or not all(name.startswith(f"{common}.") or not common for name in names):
        common = common.rpartition(".")[0]
    return common


def _changes(model: nn.Module, ancestor: str, pair: Pair, size: int) -> Iterator[dict[tuple[str, str], int]]:
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


def _split_dropouts(trace: Trace, shapes: dict[str, torch.Size], size: int) -> dict[str, int]:
    split = {}
    for name, shape in shapes.items():
        whole = trace.dropouts[name]
        differing = [dim for dim, (part, full) in enumerate(zip(shape, whole, strict=True)) if part != full]
        if differing:
            split[name] = differing[0]
    return split
