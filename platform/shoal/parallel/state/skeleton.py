"""Modules whose parameters have shapes and no memory: a plan for them is found, and a part of them loaded, by a process
that could not hold the full weights.

Buffers are real, also those that no file has. Called by an endpoint's replicas that are several workers, and where a
plan is found for a model that was built without memory.
"""

from __future__ import annotations

import gc
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from shoal.batch_tree import tensors_of
from shoal.errors import PlanError

_REMEDY = "serve it with num_workers=1"
SCALE = 0.02  # of arbitrary values
PERIOD, OFFSET = 1_000_003, 7919  # primes: numbers after which they come again, and between two parameters


class _Building(threading.local):
    """Within `replace_registered`, what is called in this thread with each parameter that a module gets."""

    take: Callable[[nn.Parameter], nn.Parameter | None] | None = None


_building = _Building()


def _replace(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """torch calls this for each parameter that a module gets, in any thread, and takes what it returns instead."""
    take = _building.take
    return None if take is None or parameter is None or is_lazy(parameter) or is_meta(parameter) else take(parameter)


# Once, since other threads may be going through torch's table; its type leaves out what a hook may return.
register_module_parameter_registration_hook(_replace)  # type: ignore[arg-type]


@contextmanager
def replace_registered(take: Callable[[nn.Parameter], nn.Parameter | None]) -> Iterator[None]:
    """Within, in this thread, modules get what `take` returns in place of a real parameter; None: the parameter."""
    before, _building.take = _building.take, take
    try:
        yield
    finally:
        _building.take = before


def is_meta(tensor: Tensor) -> bool:
    """By the dispatcher: `Tensor.device` may be asked of another mode, or disguised."""
    return torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Meta)


def build_skeleton(build: Callable[[], nn.Module]) -> nn.Module:
    """What `build` returns, in evaluation mode, with its parameters on the meta device: each is dropped as soon as a
    module has it. Raises PlanError for one that cannot be built so."""
    replaced = WeakIdKeyDictionary()

    def drop(parameter: nn.Parameter) -> nn.Parameter:
        if parameter not in replaced:  # a tied one stays tied
            replaced[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        return replaced[parameter]  # type: ignore[no-any-return]

    with replace_registered(drop):
        model = build()
    _require_registered(model)  # whose loop's variable, too, would be another reference
    if is_used_elsewhere(model):
        raise PlanError("model", type(model).__name__, "has a parameter in a list or an object, too", _REMEDY)
    return model.eval()


def _require_registered(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise PlanError("model", name, "has no shape before the first call", _REMEDY)
        if isinstance(tensor, nn.Parameter) != tensor.is_meta:
            raise PlanError("model", name, "is computed from parameters, or not a module's own", _REMEDY)


def set_parameters(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Replace parameters, by their first names; tied ones stay tied."""
    named = dict(model.named_parameters())
    replace_tensors(model, {named[name]: nn.Parameter(each, each.requires_grad) for name, each in values.items()})


def replace_tensors(model: nn.Module, replaced: Mapping[Tensor, Tensor]) -> None:
    """Put others in the place of parameters, and of buffers, wherever a module has them."""
    for module in model.modules():
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, each in [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]:
            if each in replaced:
                setattr(module, name, replaced[each])


def is_used_elsewhere(model: nn.Module) -> bool:
    """Whether anything but modules refers to a parameter, or a buffer, without memory: such as a list, which would keep
    it when it is replaced. Products with it are garbage, and raise no error."""
    if not _has_other_references(model):
        return False
    gc.collect()  # what is left of modules that were given up
    return _has_other_references(model)


def _has_other_references(model: nn.Module) -> bool:
    absent = [each for each in [*model.parameters(), *model.buffers()] if each.is_meta]
    fresh = ((each, torch.empty_like(each)) for each in absent)
    others = [nn.Parameter(other, False) if isinstance(each, nn.Parameter) else other for each, other in fresh]
    replace_tensors(model, dict(zip(absent, others, strict=True)))
    counts = [sys.getrefcount(each) for each in [*absent, torch.empty(0)]]
    replace_tensors(model, dict(zip(others, absent, strict=True)))
    return any(count > counts[-1] + 1 for count in counts)  # of what nothing but the first list refers to


@contextmanager
def lend_values(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within, the model runs: parameters without memory have arbitrary values, in the memory of the largest. So have
    buffers that are made from them, each in its own.

    The first call raises ValueError when such values give no numbers, which nothing could be compared by. So does the
    end when that call has read a number from parameters alone, which may decide what the model calls.
    """
    absent = [each for each in [*model.parameters(), *model.buffers()] if each.is_meta]
    lent: dict[Tensor, Tensor] = {}
    for each, values in zip(absent, _make_arbitrary(absent, device), strict=True):
        is_parameter = isinstance(each, nn.Parameter)
        lent[each] = nn.Parameter(values, each.requires_grad) if is_parameter else values.clone()
        vars(lent[each]).update(vars(each))

    reads, first_call = _ValueReads(lent.values()), ExitStack()

    def begin(module: nn.Module, args: Any) -> None:
        hooks.pop().remove()
        first_call.enter_context(reads)

    def check(module: nn.Module, args: Any, output: Any) -> None:
        hooks.pop().remove()
        first_call.close()
        for each in tensors_of(output):
            if each.is_floating_point() and (each.isnan().any() or not each.isfinite().any()):
                raise ValueError("arbitrary weights give no numbers")

    hooks: list[RemovableHandle] = [model.register_forward_hook(check, always_call=True)]
    hooks.append(model.register_forward_pre_hook(begin))
    replace_tensors(model, lent)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        replace_tensors(model, {other: each for each, other in lent.items()})
    if reads.has_read:
        raise ValueError("its forward pass reads the value of a parameter")


class _ValueReads(TorchDispatchMode):
    """Notes whether a number is read that follows from these tensors alone, such as by `.item()` or `if`."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_read = False
        self._derived = WeakIdKeyDictionary(dict.fromkeys(tensors, True))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if given and all(each in self._derived for each in given):
            for each in tree_leaves(result):
                if isinstance(each, Tensor):
                    self._derived[each] = True
                else:
                    self.has_read = True
        return result


def _make_arbitrary(like: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """A tensor of each shape. Matrices are parts of one row of numbers, and their own rows differ.

    Vectors are positive, since they may be scales or logarithms.
    """
    generator = torch.Generator().manual_seed(0)
    largest: dict[torch.dtype, int] = {}
    for each in like:
        largest[each.dtype] = max(1, each.numel(), largest.get(each.dtype, 0))
    numbers: dict[torch.dtype, Tensor] = {}
    for dtype, size in largest.items():
        drawn = torch.randn(min(size, PERIOD), generator=generator) * SCALE
        drawn = drawn if dtype.is_floating_point or dtype.is_complex else torch.zeros_like(drawn)
        numbers[dtype] = drawn.to(device, dtype).repeat(1 + math.ceil(size / len(drawn)))
    for index, each in enumerate(like):
        begin = index * OFFSET % min(largest[each.dtype], PERIOD)
        found = numbers[each.dtype][begin : begin + each.numel()].view(each.shape)
        yield found if each.ndim > 1 or not each.is_floating_point() else found.abs() / SCALE + 0.5


def expand_constant(like: Tensor, value: float) -> Tensor:
    """A tensor of that shape in the memory of one number, which has gradients if it may."""
    filling = torch.full((), value if like.is_floating_point() else 0, dtype=like.dtype)
    return filling.expand(like.shape).requires_grad_(like.requires_grad)
