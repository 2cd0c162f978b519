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

from shoal.parallel.layers.dropout import mixed
from shoal.parallel.tensor.dataflow import drawn_alike, lost_gradient
from shoal.parallel.tensor.trace import MISFITS, Pair, Trace, alike, largest, looking


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
    if (problem := lost_gradient(trace, pair) or drawn_alike(trace, pair)) is not None:
        return problem
    ancestor = _ancestor(trace, pair.names)
    whole = _Passage(trace.called[pair.row.name])
    try:
        _pass(whole, trace, ancestor, pair, {})
    except MISFITS as error:
        return f"what follows it cannot be tried ({_first_line(error)})"
    reason = ""
    for changes in _changes(trace.model, ancestor, pair, size):
        parts = [whole.part(index, size) for index in range(size)]
        try:
            for part in parts:
                _pass(part, trace, ancestor, pair, changes)
        except MISFITS as error:
            reason = reason or f"a part of it does not fit what follows ({_first_line(error)})"
            continue
        if (mix := _mixed(whole, parts)) is None:
            return Split(pair, changes, _split_dropouts(trace, parts[0].shapes, size))
        reason = reason or mix.format(f"what lies between {pair.columns[0].name} and {pair.row.name}")
    return reason


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:100]


class _Enough(Exception):
    """The row layer has been called as often as it is: the rest of the module need not run."""


@dataclass
class _Passage:
    """What passes through a pair when what holds it is run: all features, or one part of them.

    What the first layers give is made up. What they compute may be zeros, as of fresh weights, which show nothing; for
    the same reason it is what the last layer is given that counts, and not what it makes of that.

    num_calls: of the row layer, in all of the model
    given:     by each column layer, at each of its calls
    taken:     by the row layer, at each of its calls
    shapes:    that dropout layers were given on the way
    """

    num_calls: int
    whole: _Passage | None = None
    index: int = 0
    size: int = 1
    given: dict[str, list[Tensor]] = field(default_factory=dict)
    taken: list[Tensor] = field(default_factory=list)
    shapes: dict[str, torch.Size] = field(default_factory=dict)

    def part(self, index: int, size: int) -> _Passage:
        return _Passage(self.num_calls, self, index, size)

    def give(self, name: str, computed: Tensor) -> Tensor:
        """What a column layer gives instead of what it has computed."""
        calls = self.given.setdefault(name, [])
        if self.whole is None:
            made = torch.randn(computed.shape, generator=_generator(name, len(calls)), dtype=torch.float32)
            calls.append(made.to(computed))
        else:
            calls.append(self.whole.given[name][len(calls)].chunk(self.size, -1)[self.index])
        return calls[-1].clone()

    def take(self, entering: Tensor) -> Tensor:
        """What the row layer works on instead of what enters it: all of the features."""
        self.taken.append(entering.clone())
        if len(self.taken) == self.num_calls:
            raise _Enough
        return entering if self.whole is None else self.whole.taken[len(self.taken) - 1].clone()


def _generator(name: str, call: int) -> torch.Generator:
    return torch.Generator().manual_seed(mixed(crc32(name.encode()), call))


def _pass(passage: _Passage, trace: Trace, ancestor: str, pair: Pair, changes: dict[tuple[str, str], int]) -> None:
    """Run what holds the pair, with `changes`. Raises one of MISFITS when it does not fit."""

    def giving(name: str) -> Callable[..., Tensor]:
        return lambda module, args, output: passage.give(name, output)

    def noting(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Tensor) -> None:
            passage.shapes.setdefault(name, output.shape)

        return note

    args, kwargs = copy.deepcopy(trace.entered[ancestor])
    with looking(trace.model), ExitStack() as undo:  # each begins with the same random numbers
        for call in pair.columns:
            undo.callback(call.module.register_forward_hook(giving(call.name), prepend=True).remove)
        undo.callback(pair.row.module.register_forward_pre_hook(lambda _, args: (passage.take(args[0]),)).remove)
        for name in trace.dropouts:
            undo.callback(trace.model.get_submodule(name).register_forward_hook(noting(name)).remove)
        for (owner, attribute), value in changes.items():
            holder = trace.model.get_submodule(owner)
            undo.callback(setattr, holder, attribute, getattr(holder, attribute))
            setattr(holder, attribute, value)
        with suppress(_Enough):
            trace.model.get_submodule(ancestor)(*args, **kwargs)
    if not passage.taken:
        raise RuntimeError("the second layer is not called after the first ones")


def _mixed(whole: _Passage, parts: list[_Passage]) -> str | None:
    """Why what the row layer is given in parts is not what it is given whole; None when it is."""
    for part in parts:
        if len(part.taken) != len(whole.taken):
            return "{} is passed another number of times by a part"
        for found, taken in zip(part.taken, whole.taken, strict=True):
            expected = taken.chunk(part.size, -1)[part.index]
            if found.shape != expected.shape:
                return "{} gives a part another shape"
            if largest(taken) == 0.0:
                return "{} gives nothing but zeros, which prove nothing"
            if not alike(found, expected, largest(taken)):
                return "{} mixes the parts"
    return None


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
