"""What a Task's loss divides by, as seen from the torch functions that it calls.

Owns `LossReader`, by which plans that split batches call a loss. A mean of torch's that divides by another number than
that of the samples is computed as a sum and a count: a loss that is such a mean, or its product with a number, becomes
a `Mean`. Any other loss stays as it is: the check of split losses judges it. Called by every plan. Communicates
nothing; changes no other function's result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn._reduction import legacy_get_string
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_map_only

from shoal.parallel.loss import LOSS, FoundMean, Mean, get_value, require_loss, split_mean

T = TypeVar("T")
_WITH_LABELS = (functional.cross_entropy, functional.nll_loss)
_WITH_WEIGHTS = (functional.mse_loss, functional.l1_loss)
_LINEAR = {"mul", "multiply", "neg", "div", "divide", "true_divide", "reshape", "view", "squeeze", "contiguous"}
_LINEAR |= {"clone", "float", "double", "to", "mean", "sum"}
_TAG = "_shoal_mean"  # an attribute of tensors: the mean that it is, and its version then


class LossReader:
    """Calls a Task's loss, and finds what it divides by.

    is_active: whether batches are split; otherwise a loss is as the Task gives it
    """

    def __init__(self, model: nn.Module, is_active: bool) -> None:
        self.is_active = is_active
        self._has_own_loss = _may_compute_loss(model)

    def read_outputs(self, forward: Callable[[], T]) -> T:
        """The model's outputs. A model may compute its loss itself."""
        if not (self.is_active and self._has_own_loss):
            return forward()
        with LossTrace():
            outputs = forward()
        self._has_own_loss = getattr(outputs, "loss", None) is not None
        return outputs

    def read(self, compute: Callable[[], T]) -> T:
        """What `compute` gives, with each mean that has a count as a `Mean`."""
        return find_means(compute) if self.is_active else compute()

    def measure_loss(self, compute: Callable[[Any], Any], outputs: Any, num_samples: int) -> dict[str, Tensor]:
        """`measure` of the loss that `compute` gives of the model's outputs, beside which it is differentiated."""
        leaves: list[Tensor] = []
        if not self._has_own_loss:
            outputs, leaves = watch_gradients(outputs)
        with torch.enable_grad():
            return measure(lambda: compute(outputs), leaves, num_samples)


def watch_gradients(outputs: Any) -> tuple[Any, list[Tensor]]:
    """Copies of a model's outputs, and what to differentiate by."""
    leaves: list[Tensor] = []

    def watch(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        leaves.append(tensor.detach().requires_grad_())
        return leaves[-1].clone()  # which may be changed in place

    with torch.enable_grad():
        return tree_map_only(Tensor, watch, outputs), leaves


def measure(compute: Callable[[], Any], leaves: Sequence[Tensor], num_samples: int) -> dict[str, Tensor]:
    """[5]: numerator and denominator of the loss, the numerator's derivative when all `leaves` grow in proportion, the
    sum of the absolute terms of this derivative, and how exact the loss's type is.

    Of several optimizers, the first one's loss; what has no gradient is only recorded.
    """

    def compute_first() -> Any:
        result = compute()
        if isinstance(result, Mapping):
            return result[LOSS]
        if not isinstance(result, Iterator):
            return result
        return next((each for _, each in result if get_value(each).requires_grad), torch.zeros(()))

    loss = require_loss(find_means(compute_first))
    total = loss.total if isinstance(loss, Mean) else loss * num_samples
    eps = torch.finfo(total.dtype).eps
    grown = total.new_zeros(2, dtype=torch.float64)
    if leaves and total.requires_grad:
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                terms = (gradient * leaf.detach()).double()
                grown = grown + torch.stack([terms.sum(), terms.abs().sum()])
    return {LOSS: torch.cat([split_mean(loss, num_samples), grown, grown.new_tensor([eps])])}


def find_means(compute: Callable[[], T]) -> T:
    """The losses that `compute` gives: one, some by name, or one of an optimizer's; means with a count as `Mean`s."""
    with LossTrace():
        result: Any = compute()
    if isinstance(result, Mapping):
        return {name: _find_mean(each) for name, each in result.items()}  # type: ignore[return-value]
    if isinstance(result, tuple) and len(result) == 2:
        return result[0], _find_mean(result[1])  # type: ignore[return-value]
    return _find_mean(result)  # type: ignore[no-any-return]


def pause_trace(module: nn.Module) -> AbstractContextManager[object]:
    """The context of a call of a compiled module, unless it computes a loss: a function mode breaks up its graph."""
    is_traced = isinstance(_get_current_function_mode(), LossTrace) and not _may_compute_loss(module)
    return _pop_mode_temporarily() if is_traced else nullcontext()


def _may_compute_loss(model: nn.Module) -> bool:
    return hasattr(type(model), "loss_function")  # those of transformers


def _get_mean(tensor: Any) -> FoundMean | None:
    """The mean that a tensor is, unless it was changed in place since."""
    mean, version = getattr(tensor, _TAG, (None, 0))
    return mean if mean is not None and tensor._version == version else None


def _find_mean(loss: Any) -> Any:
    mean = _get_mean(loss)
    # Within an autograd function, operations have no gradient.
    return loss if mean is None or mean.total.requires_grad != loss.requires_grad else mean


class LossTrace(TorchFunctionMode):
    """Follows the calls of torch functions: a result that is a mean with a count has it as an attribute."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.l1_loss:
            kwargs = {**kwargs, "weight": _find_weight()}
        if func in _WITH_LABELS or func in _WITH_WEIGHTS:
            found = _split_mean(func, args, kwargs)
            if found is not None:
                return found
        result = func(*args, **kwargs)
        mean = _get_mean(args[0]) if args and func.__name__ in _LINEAR and isinstance(result, Tensor) else None
        is_scaled = not any(isinstance(each, Tensor) for each in (*args[1:], *kwargs.values()))
        if mean is not None and is_scaled and not result.is_inference():
            _tag(result, replace(mean, total=func(mean.total, *args[1:], **kwargs)))
        return result


def _tag(result: Tensor, mean: FoundMean) -> None:
    setattr(result, _TAG, (mean, result._version))


def _split_mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The result of a mean with a count, tagged with both; None: another reduction, or a mean over all elements."""
    reduction, (_, target) = kwargs.get("reduction", "mean"), args
    if kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
        reduction = legacy_get_string(kwargs.get("size_average"), kwargs.get("reduce"), emit_warning=False)
    weight: Any = kwargs.get("weight")
    size: int | None = None
    if reduction != "mean" or (func in _WITH_WEIGHTS and weight is None) or torch.is_inference_mode_enabled():
        return None
    if func in _WITH_LABELS and target.is_floating_point():  # probabilities of classes: a mean over the samples
        return None
    if func in _WITH_WEIGHTS:
        count = weight.sum()
    else:
        is_counted = target != kwargs.get("ignore_index", -100)
        if weight is None:
            count, size = is_counted.sum(), target.numel()
        else:
            count = (weight[torch.where(is_counted, target, 0)] * is_counted).sum()
    total = func(*args, **{**kwargs, "size_average": None, "reduce": None, "reduction": "sum"})
    result: Tensor = total / count
    _tag(result, FoundMean(total, count.detach(), size))
    return result


def _find_weight() -> Tensor | None:
    """The weight of the innermost call of `l1_loss`, which torch does not pass on to function modes."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not functional.l1_loss.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["weight"]
