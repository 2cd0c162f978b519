"""The state of a model other than its parameters, and undoing a pass through it.

A forward pass may change, replace, grow or create a buffer (running statistics, masks, caches), and set attributes that
record it: they are restored together. Called by plans, and by code that tries a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def snapshot_module(model: nn.Module) -> Callable[[], None]:
    """The present state of all modules: buffers with their values, and attributes of their own."""
    held = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    tensors = [each for _, *both in held for some in both for each in some.values() if isinstance(each, Tensor)]
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
    """Restore the state of all modules after the body."""
    restore = snapshot_module(model)
    try:
        yield
    finally:
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
