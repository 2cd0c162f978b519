"""Weights that a run neither trains nor saves, such as the base of adapters.

They are buffers without persistence: no state dict, optimizer or exchange of gradients has them. For a plan that shards
or splits the model they are made parameters again, which stay in no state dict. Called by Tasks, and by `parallelize`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_NAMES = "_frozen_weights"  # attribute of a module: the names of its own


def freeze_parameters(model: nn.Module, names: Collection[str]) -> None:
    """Freeze these parameters of `model`, in place; tied ones, of which all names are given, stay tied."""
    buffers: dict[nn.Parameter, Tensor] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name in names:
            path, _, last = name.rpartition(".")
            module = model.get_submodule(path)
            if module._parameters.pop(last, None) is not None:  # a module may have several paths
                module.register_buffer(last, buffers.setdefault(parameter, parameter.detach()), persistent=False)
                setattr(module, _NAMES, (*vars(module).get(_NAMES, ()), last))


def iter_frozen(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """The frozen weights of `model`, with module and name; without those that are parameters again."""
    for module in model.modules():
        for name in vars(module).get(_NAMES, ()):
            if name in module._buffers:
                yield module, name, module.get_buffer(name)


def restore_parameters(model: nn.Module) -> None:
    """Make parameters without gradients of the frozen weights of `model`, in place, for a plan that divides them."""
    parameters: dict[Tensor, nn.Parameter] = {}
    for module, name, tensor in list(iter_frozen(model)):
        if not tensor.ndim:  # nothing to divide
            continue
        if tensor not in parameters:
            parameters[tensor] = nn.Parameter(tensor, requires_grad=False)
        delattr(module, name)
        module.register_parameter(name, parameters[tensor])
        module.register_state_dict_post_hook(_leave_out)


def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, _: Mapping[str, Any]) -> None:
    for name in vars(module)[_NAMES]:
        state.pop(f"{prefix}{name}", None)
