"""Runs a model's own forward from one split point to another: a stage's computation, without rewriting the model.

Gates around some modules' calls (including their hooks) decide for each call: calls before the stage are skipped (with
zeros of the right shape as results, so that masks, positions and other values that the model derives exist), at the
stage's first split point the received tensor replaces the argument, and at the next one the pass ends. Called by
`pipeline`. Knows no process group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from shoal.errors import PlanError
from shoal.parallel.pipeline.split_points import ModuleCall, SplitPoint, replace_argument
from shoal.parallel.state.module_snapshot import eval_mode
from shoal.parallel.state.skeleton import replace_tensors


@dataclass(frozen=True)
class GateAction:
    """A gate's action for one call."""

    kind: Literal["skip", "enter", "leave"]
    argument: int | str = 0


@dataclass
class StageSlice:
    """The gates' actions in a pass of one stage: by module, and by its number of earlier calls in the pass.

    foreign: modules without parameters on this stage, since profiling showed no call of them here
    """

    begins: str | None
    ends: str | None
    actions: dict[str, dict[int, GateAction]] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)


def build_stage_slices(
    calls: Sequence[ModuleCall], split_points: Sequence[SplitPoint], watched: Collection[str] = ()
) -> list[StageSlice]:
    """The slices of the stages between these split points.

    watched: modules that a stage runs only if profiling has shown it; the first stage may also run those never seen,
             since it has their parameters
    """
    slices = []
    for begin, end in pairwise([None, *split_points, None]):
        first, after = begin.call if begin else 0, end.call if end else len(calls)
        called_here = {call.module for call in calls[:after] if call.last >= first}  # between, or around the first
        stage = _build_slice(calls, begin, end)
        stage.foreign = set(watched) - called_here
        if begin is None:
            stage.foreign &= {call.module for call in calls}
        slices.append(stage)
    return slices


def _build_slice(calls: Sequence[ModuleCall], begin: SplitPoint | None, end: SplitPoint | None) -> StageSlice:
    view = StageSlice(begin.module if begin else None, end.module if end else None)
    counts: Counter[str] = Counter()
    index = 0
    while index < len(calls):
        call = calls[index]
        count = counts[call.module]
        counts[call.module] += 1
        actions = view.actions.setdefault(call.module, {})
        if end is not None and index == end.call:
            actions[count] = GateAction("leave", end.argument)
            break
        if begin is not None and index == begin.call:
            actions[count] = GateAction("enter", begin.argument)
        elif begin is not None and call.last < begin.call:
            actions[count] = GateAction("skip")
            index = call.last
        index += 1
    view.actions = {name: actions for name, actions in view.actions.items() if actions}
    return view


class _LeaveForward(BaseException):  # not an Exception, so that no handler of the model catches it
    def __init__(self, handed: Tensor) -> None:
        super().__init__()
        self.handed = handed


class StageForward:
    """A model whose forward can be run in parts. Until `remove`, it cannot be called in any other way.

    filler: the result of skipped calls; NaN while verifying that nothing depends on them
    """

    def __init__(self, model: nn.Module, views: Sequence[StageSlice]) -> None:
        self.model = model
        self.slices = list(views)
        self.filler = 0.0
        self._slice: StageSlice | None = None
        self._counts: Counter[str] = Counter()
        self._received: Tensor | None = None
        self._shapes: dict[Any, tuple[list[Any], Any]] = {}
        modules = dict(model.named_modules())
        self._gated_modules = [
            modules[name] for name in sorted({name for view in views for name in {*view.actions, *view.foreign}})
        ]
        names = {module: name for name, module in modules.items()}
        self._compiled = [module._compiled_call_impl for module in self._gated_modules]
        for module, compiled in zip(self._gated_modules, self._compiled, strict=True):
            # PyTorch calls this before any hook: hooks that gather and shard weights run if and only if their module
            # does.
            module._compiled_call_impl = partial(self._gate, names[module], module, compiled or module._call_impl)

    def remove(self) -> None:
        """Restore the modules' calls."""
        for module, compiled in zip(self._gated_modules, self._compiled, strict=False):
            module._compiled_call_impl = compiled
        self._gated_modules = []

    def run(self, stage: int, inputs: tuple[Any, ...], received: Tensor | None) -> Any:
        """The stage's output, or the model's if it is the last.

        received: the output of the stage before; None for the first
        """
        view = self.slices[stage]
        self._slice = view
        self._counts = Counter()
        self._received = received
        try:
            result = self.model(*inputs)
        except _LeaveForward as left:
            return left.handed
        finally:
            self._slice = None
        if view.ends is not None or (view.begins is not None and self._received is not None):
            raise _changed_calls_error(view.ends or view.begins or "", "was not called in this pass")
        return result

    def _gate(self, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._slice is None:
            if torch._C._current_graph_task_id() == -1 and any(name in view.actions for view in self.slices):
                raise _changed_calls_error(name, "was called outside of a stage's pass")
            return forward(*args, **kwargs)  # recomputed by activation checkpointing
        count = self._counts[name]
        self._counts[name] += 1
        action = self._slice.actions.get(name, {}).get(count)
        if action is None:
            if name in self._slice.foreign:
                raise _changed_calls_error(name, "was not called in this stage when the model was surveyed")
            return forward(*args, **kwargs)
        if action.kind == "skip":
            return self.make_placeholder(name, module, forward, args, kwargs)
        given = kwargs[action.argument] if isinstance(action.argument, str) else args[action.argument]
        if action.kind == "leave":
            raise _LeaveForward(given)
        received, self._received = self._received, None
        assert received is not None, "a module is called twice where it was called once"
        is_written = False
        expected = (received.shape, received.dtype)
        if isinstance(given, Tensor) and (given.shape, given.dtype) == expected:
            with suppress(RuntimeError):  # a view that autograd cannot track: then only the call gets it
                given.copy_(received)  # so that the caller (`x = x + block(x)`) gets it, too
                is_written = True
        if not is_written:
            args, kwargs = replace_argument(args, kwargs, action.argument, received)
        return forward(*args, **kwargs)

    def make_placeholder(
        self, name: str, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Tensors like the results of the skipped call; their shapes are found once."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        kinds: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                kinds.append(_TensorShape.of(leaf))
            else:
                kinds.append(leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf))
        key = (name, structure, tuple(kinds))
        if key not in self._shapes:
            results, form = pytree.tree_flatten(self.call_ungated(module, forward, args, kwargs))
            self._shapes[key] = [_TensorShape.of(each) if isinstance(each, Tensor) else each for each in results], form
        shapes, form = self._shapes[key]
        filled = [shape.make_full(self.filler) if isinstance(shape, _TensorShape) else shape for shape in shapes]
        return pytree.tree_unflatten(filled, form)

    def call_ungated(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The results of a skipped call, for their shapes."""
        view, self._slice = self._slice, StageSlice(None, None)
        counts, self._counts = self._counts, Counter()
        try:
            with eval_mode(module), torch.no_grad():  # neither random state nor running statistics are touched
                return forward(*args, **kwargs)
        finally:
            self._slice, self._counts = view, counts


@dataclass(frozen=True)
class _TensorShape:
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> _TensorShape:
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def make_full(self, value: float) -> Tensor:
        return torch.full(
            self.shape, value if self.dtype.is_floating_point else 0, dtype=self.dtype, device=self.device
        )


def _changed_calls_error(module: str, problem: str) -> PlanError:
    remedy = "a pipeline needs the same calls in every pass: turn off what skips or chooses layers, or use ddp"
    return PlanError("parallel.pipeline", module, problem, remedy)


@contextmanager
def mask_parameters(model: nn.Module, parameters: set[str], value: float = 0.0) -> Iterator[None]:
    """Within, these parameters (by their first names) have no own values: all are `value`."""
    values = {name: parameter.data for name, parameter in model.named_parameters() if name in parameters}
    named = dict(model.named_parameters())
    try:
        for name, data in values.items():
            named[name].data = _make_filler(data, value, data.device)
        yield
    finally:
        for name, data in values.items():
            named[name].data = data


def release_parameters(model: nn.Module, retained: set[str], device: torch.device) -> None:
    """Free the memory of all parameters but these, by zeros on `device` of the same shape that share one element."""
    named = {name: each for name, each in model.named_parameters() if name not in retained}
    replace_tensors(model, {each: nn.Parameter(_make_filler(each.data, 0.0, device), False) for each in named.values()})


def _make_filler(data: Tensor, value: float, device: torch.device) -> Tensor:
    if isinstance(data, DTensor):
        part = _make_filler(data.to_local(), value, device)
        shape, stride = data.shape, data.stride()
        return DTensor.from_local(part, data.device_mesh, data.placements, run_check=False, shape=shape, stride=stride)
    filling = value if data.is_floating_point() else 0
    return torch.full((), filling, dtype=data.dtype, device=device).expand(data.shape)
