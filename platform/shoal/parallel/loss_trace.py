"""What a Task's loss divides by, as seen from the torch functions that it calls.

Owns `LossReader`, by which plans that split batches call a loss. A mean of torch's that divides by another number than
that of the samples is computed as a sum and a count: a loss that is such a mean becomes a `Mean`. Where one is only a
part of the loss, or where the loss divides by a sum itself, the reader refuses it, unless the check of split losses has
accepted it. Called by every plan. Communicates nothing; changes no other function's result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn._reduction import legacy_get_string
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from shoal.errors import ConfigError
from shoal.parallel.loss import LOSS, FoundMean

T = TypeVar("T")
REMEDY = "return shoal.Mean(total, count) from it; check_loss=false accepts the mean of the parts"
_WITH_LABELS = (functional.cross_entropy, functional.nll_loss)
_WITH_WEIGHTS = (functional.mse_loss, functional.l1_loss)
_DIVISIONS = {"div", "divide", "true_divide"}
_COPIES = {"reshape", "view", "squeeze", "contiguous", "clone", "float", "double", "to", "mean", "sum"}
_LINEAR = {"mul", "multiply", "neg", *_DIVISIONS, *_COPIES}
_SUMS = {"sum", "nansum", "count_nonzero"}
_SELECTIONS = {"__getitem__", "masked_select"}
_TAG = "_shoal_tag"  # an attribute of tensors


@dataclass(frozen=True, eq=False)
class Division:
    """A division within a loss.

    function: its name
    count:    scalar: the divisor
    size:     the count if all terms count equally; None: it depends on the contents of the batch
    trace:    that has seen it: of earlier ones, which results may hold that a Task keeps, nothing is said
    """

    function: str
    count: Tensor
    size: int | None
    trace: LossTrace

    def is_uneven(self) -> bool:
        return self.size is None or int(self.count) != self.size


@dataclass(frozen=True)
class TraceTag:
    """What is known of a tensor.

    divisions:   those that it depends on
    is_sum:      a scalar that depends on a sum
    is_selected: it depends on elements that were selected by a mask
    mean:        what it is, as long as it has this `version`
    """

    divisions: tuple[Division, ...] = ()
    is_sum: bool = False
    is_selected: bool = False
    mean: FoundMean | None = None
    version: int = 0


_NOTHING = TraceTag()


class MeasuredLoss(NamedTuple):
    """The loss of a batch.

    weight:   the count of a mean that was found in it; None: a mean over the samples
    divisors: the sum of what it divides by in parts that are no such mean; 0: it does not
    """

    value: Tensor
    weight: Tensor | float | None
    divisors: float


class LossReader:
    """Calls a Task's loss, and finds what it divides by.

    is_active:   whether batches are split; otherwise a loss is as the Task gives it
    is_accepted: whether a loss may divide by other numbers without being a `Mean`: by the spec, or since the check has
                 seen that the parts of a batch have its mean
    """

    def __init__(self, model: nn.Module, is_active: bool) -> None:
        self.is_active, self.is_accepted = is_active, True
        self._has_own_loss = _may_compute_loss(model)
        self._forward_trace: LossTrace | None = None

    def read_outputs(self, forward: Callable[[], T]) -> T:
        """The model's outputs. A model may compute its loss itself."""
        if not (self.is_active and self._has_own_loss):
            return forward()
        with LossTrace() as self._forward_trace:
            outputs = forward()
        self._has_own_loss = getattr(outputs, "loss", None) is not None
        return outputs

    def read(self, compute: Callable[[], T]) -> T:
        """What `compute` gives, with each mean that has a count as a `Mean`.

        Raises ConfigError for a loss that divides by other numbers, unless it is accepted.
        """
        if not self.is_active:
            return compute()
        result = find_means(compute, self._forward_trace)
        if not self.is_accepted:
            loss: object = result.get(LOSS) if isinstance(result, Mapping) else result
            loss = loss[1] if isinstance(loss, tuple) else loss
            for division in filter(Division.is_uneven, get_trace_tag(loss).divisions):
                problem = f"divides by {division.function}, as a part of the loss, and the run splits its batches"
                raise ConfigError("Task.loss", division.function, problem, REMEDY)
        return result

    def measure(self, compute: Callable[[], Any]) -> MeasuredLoss | None:
        """As `read`, for the check; None for a `Mean` of the Task's own, and for losses of several optimizers."""
        result = find_means(compute, self._forward_trace)
        loss = result.get(LOSS) if isinstance(result, Mapping) else result
        if isinstance(loss, FoundMean):
            value = loss.value().detach().to(loss.total.dtype)  # which says how exact it is
            return MeasuredLoss(value, loss.count, 0.0)
        if not isinstance(loss, Tensor):
            return None
        return MeasuredLoss(loss.detach(), None, sum(float(each.count) for each in get_trace_tag(loss).divisions))


def find_means(compute: Callable[[], T], forward: LossTrace | None = None) -> T:
    """The losses that `compute` gives: one, some by name, or one of an optimizer's; means with a count as `Mean`s.

    forward: of the model's forward pass, if it may have computed the loss
    """
    with LossTrace(forward):
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


def get_trace_tag(tensor: object) -> TraceTag:
    tag: TraceTag = getattr(tensor, _TAG, _NOTHING)
    return tag


def _find_mean(loss: Any) -> Any:
    tag = get_trace_tag(loss)
    if tag.mean is None or loss._version != tag.version or tag.mean.total.requires_grad != loss.requires_grad:
        return loss  # also if changed in place, or within an autograd function, whose operations have no gradient
    return tag.mean


class LossTrace(TorchFunctionMode):
    """Follows the calls of torch functions: tags on their results say what they were divided by.

    forward: the trace before, of the same batch
    """

    def __init__(self, forward: LossTrace | None = None) -> None:
        super().__init__()
        self._forward = forward

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.l1_loss:
            kwargs = {**kwargs, "weight": _find_weight()}
        if func in _WITH_LABELS or func in _WITH_WEIGHTS:
            mean = self._split_mean(func, args, kwargs)
            if mean is not None:
                return mean
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self._follow(func, args, kwargs, result)
        return result

    def _split_mean(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
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
                is_selected = any(get_trace_tag(each).is_selected for each in args)
                count, size = is_counted.sum(), None if is_selected else target.numel()
            else:
                count = (weight[torch.where(is_counted, target, 0)] * is_counted).sum()
        total = func(*args, **{**kwargs, "size_average": None, "reduce": None, "reduction": "sum"})
        result: Tensor = total / count
        count = count.detach()
        divisions = (Division(func.__name__, count, size, self),)
        setattr(result, _TAG, TraceTag(divisions, mean=FoundMean(total, count, size), version=result._version))
        return result

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        """TraceTag a result by the tags of the arguments."""
        name, given = func.__name__, list(_iter_tensors((*args, *kwargs.values())))
        tags = [get_trace_tag(tensor) for tensor in given]
        is_mask = name in _SELECTIONS and any(each.dtype == torch.bool for each in given[1:])
        if not (is_mask or name in _SUMS or any(each is not _NOTHING for each in tags)):
            return
        divisions = {each: None for tag in tags for each in tag.divisions if each.trace in (self, self._forward)}
        is_selected = is_mask or any(tag.is_selected for tag in tags)
        if is_selected and not result.ndim and kwargs.get("reduction", name) == "mean":
            divisions[Division(f"{name} of selected elements", torch.tensor(given[0].numel()), None, self)] = None
        if name in _DIVISIONS and len(given) == 2 and tags[1].is_sum:
            divisions[Division("a sum", given[1].detach(), None, self)] = None
        is_sum = not result.ndim and (name in _SUMS or any(tag.is_sum for tag in tags))
        mean, version = None, 0 if result.is_inference() else result._version
        is_linear = bool(args) and args[0] is given[0] and name in _LINEAR and not result.is_inference()
        if len(given) == 1 and is_linear and tags[0].mean is not None and tags[0].version == given[0]._version:
            total = func(tags[0].mean.total, *args[1:], **kwargs)
            mean = FoundMean(total, tags[0].mean.count, tags[0].mean.size)
        setattr(result, _TAG, TraceTag(tuple(divisions), is_sum, is_selected and bool(result.ndim), mean, version))


def _find_weight() -> Tensor | None:
    """The weight of the innermost call of `l1_loss`, which torch does not pass on to function modes."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not functional.l1_loss.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["weight"]


def _iter_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _iter_tensors(each)
