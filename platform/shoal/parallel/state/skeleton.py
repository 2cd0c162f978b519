"""Modules whose parameters have shapes and no memory: a plan for them is found, and a part of them loaded, by a process
that could not hold the full weights.

Buffers are real, also those that no file has. Called by an endpoint's replicas that are several workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from shoal.errors import PlanError

_REMEDY = "serve it with num_workers=1"


class _Building(threading.local):
    """What this thread has replaced, while it builds a skeleton."""

    replaced: WeakIdKeyDictionary | None = None


_building = _Building()


def _drop_memory(module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
    """torch calls this for each parameter that a module gets, in any thread, and takes what it returns instead."""
    replaced = _building.replaced
    if replaced is None or parameter is None or parameter.is_meta or isinstance(parameter, UninitializedParameter):
        return None
    if parameter not in replaced:  # a tied one stays tied
        replaced[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    found: nn.Parameter = replaced[parameter]
    return found


# Once, since other threads may be going through torch's table; its type leaves out what a hook may return.
register_module_parameter_registration_hook(_drop_memory)  # type: ignore[arg-type]


def build_skeleton(build: Callable[[], nn.Module]) -> nn.Module:
    """What `build` returns, in evaluation mode, with its parameters on the meta device: each is dropped as soon as a
    module has it. Raises PlanError for one that cannot be built so."""
    _building.replaced = WeakIdKeyDictionary()
    try:
        model = build()
    finally:
        _building.replaced = None
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, UninitializedParameter):
            raise PlanError("model", name, "has no shape before the first call", _REMEDY)
        if isinstance(tensor, nn.Parameter) != tensor.is_meta:
            raise PlanError("model", name, "is computed from parameters, or not a module's own", _REMEDY)
    return model.eval()


def set_parameters(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Replace parameters, by their first names; tied ones stay tied."""
    named = dict(model.named_parameters())
    replaced = {named[name]: nn.Parameter(value, value.requires_grad) for name, value in values.items()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter in replaced:
                setattr(module, name, replaced[parameter])


def make_constant(like: Tensor, value: float) -> Tensor:
    """A tensor of that shape in the memory of one number, which has gradients if it may."""
    filling = torch.full((), value if like.is_floating_point() else 0, dtype=like.dtype)
    return filling.expand(like.shape).requires_grad_(like.requires_grad)
