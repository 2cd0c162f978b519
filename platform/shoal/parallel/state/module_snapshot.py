"""What a model holds in addition to its parameters: snapshot and preserve it around a pass.

A forward pass may change, replace, grow or create a buffer (running statistics, masks, caches), and set attributes that
record it: they are restored together. Called by plans, and by code that tries a model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def snapshot_module(model: nn.Module) -> Callable[[], None]:
    """What lets all modules hold again what they hold now: buffers with their values, and attributes of their own.

    Of a scripted module, only the values can change. Frozen weights do not change, and are not copied.
    """
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    held = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
    own = [each for _, attributes, _ in held for each in attributes.values() if isinstance(each, Tensor)]
    frozen = {each for _, _, each in iter_frozen(model)}
    tensors = [*(each for each in model.buffers() if each not in frozen), *own]
    values = [each.detach().clone() for each in tensors]

    def restore() -> None:
        for module, attributes, buffers in held:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        for each, value in zip(tensors, values, strict=True):
            if not torch.equal(each, value):
                each.detach().copy_(value)

    return restore


@contextmanager
def preserve_module(model: nn.Module) -> Iterator[None]:
    """Afterwards all modules hold what they held before, and parameters the gradients: within, they begin with none."""
    restore = snapshot_module(model)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        restore()


@contextmanager
def preserve_parameter_attributes(model: nn.Module) -> Iterator[None]:
    """Restore attributes of the parameters after the body (a user's `no_decay`, for example), even if other parameters,
    with a part of each, have replaced them."""
    before = {name: dict(vars(parameter)) for name, parameter in model.named_parameters(remove_duplicate=False)}
    yield
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for attribute, value in before[name].items():
            vars(parameter).setdefault(attribute, value)


@contextmanager
def hook_modules(
    model: nn.Module, enter: Callable[..., Any], leave: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Within, a module's call begins with `enter(module, args, kwargs)` and ends with `leave(module, args, output)`."""
    handles = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in model.modules()]
    if leave is not None:
        handles += [module.register_forward_hook(leave) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether a hook is called with the parameter's gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def get_trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode within; afterwards each layer returns to its own mode (some may be frozen)."""
    training = [each for each in module.modules() if each.training]
    module.eval()
    try:
        yield
    finally:
        for each in training:
            each.training = True


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
