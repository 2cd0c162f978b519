"""A stage of a pipeline, in which what other workers have is marked: an answer that depends on it is an error.

Called by `plan`, which runs all stages on an example, and by `shard`, since a request may take another branch than the
example. The mark follows a value through all of torch's functions; the autograd graph, from which a plan is found, does
not show uses without a gradient, such as those of integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.errors import PlanError
from shoal.parallel.pipeline.partition import StagePartition
from shoal.parallel.pipeline.stage_forward import StageForward, build_stage_slices
from shoal.parallel.state.skeleton import make_constant, set_parameters

_READS = frozenset({"__bool__", "__int__", "__float__", "__index__", "__array__", "item", "tolist", "numpy", "equal"})
_READS |= {"__dlpack__", "allclose", "is_nonzero"}
_SHAPES = frozenset({"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"})
_SHAPES |= {"copy_", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"}
_LIKE_ANOTHER = frozenset({"expand_as", "view_as", "reshape_as", "type_as", "to"})


class AbsentTensor(Tensor):
    """A value that another worker has, or that follows from one; `origin` names the parameter or module."""

    origin = ""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        if name == "__get__" and not isinstance(result, Tensor):  # a shape, or a type
            return result
        sources = args[:1] if name in _LIKE_ANOTHER else args[1:] if name in _SHAPES else (args, kwargs)
        origin = next((each.origin for each in pytree.tree_leaves(sources) if isinstance(each, AbsentTensor)), None)
        if origin is None:
            return _clear(result)
        if name in _READS:
            raise _make_error(origin)
        if name in ("__setitem__", "__set__"):  # others that write return what they have written
            mark_absent(args[0], origin)
        return pytree.tree_map_only(Tensor, lambda each: mark_absent(each, origin), result)


def mark_absent(tensor: Tensor, origin: str) -> Tensor:
    """The same tensor, marked."""
    if type(tensor) is not Tensor and type(tensor) is not AbsentTensor:  # such as a parameter
        tensor = tensor.as_subclass(AbsentTensor)
    tensor.__class__ = AbsentTensor
    tensor.origin = origin  # type: ignore[attr-defined]
    return tensor


def _clear(result: Any) -> Any:
    for each in pytree.tree_leaves(result):
        if type(each) is AbsentTensor:
            each.__class__ = Tensor  # type: ignore[assignment]
    return result


class Stage(StageForward):
    """One stage of a model, whose other parameters are without memory.

    Set the parameters that it has before, or after.
    """

    def __init__(self, model: nn.Module, stages: StagePartition, rank: int) -> None:
        watched = {call.module for call in stages.calls if _has_parameters(model, call.module)}
        super().__init__(model, build_stage_slices(stages.calls, stages.split_points, watched))
        self._rank = rank

    def __call__(self, inputs: tuple[Any, ...], received: Tensor | None) -> Any:
        """The output of the stage. Raises PlanError when it depends on what other workers have.

        received: what the stage before gave; None in the first
        """
        result = self.run(self._rank, inputs, received)
        for each in pytree.tree_leaves(result):
            if isinstance(each, AbsentTensor):
                raise _make_error(each.origin)
        return result

    def make_placeholder(self, name: str, *call: Any) -> Any:
        made = super().make_placeholder(name, *call)
        return pytree.tree_map_only(Tensor, lambda each: mark_absent(each, name), made)

    def call_ungated(self, *call: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # for the shapes of its results alone
            return super().call_ungated(*call)


def _has_parameters(model: nn.Module, name: str) -> bool:
    return next(model.get_submodule(name).parameters(recurse=False), None) is not None


def make_absent(name: str, parameter: Tensor) -> Tensor:
    """The stand-in of a parameter that another worker has."""
    return mark_absent(make_constant(parameter, 0.0).detach(), name)


def check_stages(model: nn.Module, stages: StagePartition, inputs: tuple[Any, ...], value: float) -> None:
    """Run all stages on an example, whose parameters are `value`. Raises PlanError when an output, an integer too,
    depends on what another stage has."""
    received: Tensor | None = None
    for rank in range(len(stages.split_points) + 1):
        values = {
            name: (make_constant(each, value) if rank in stages.parameters[name] else make_absent(name, each))
            for name, each in model.named_parameters()
        }
        set_parameters(model, {name: each.requires_grad_(False) for name, each in values.items()})
        stage = Stage(model, stages, rank)
        try:
            with torch.inference_mode():
                received = stage(inputs, received)
        finally:
            stage.remove()


def _make_error(origin: str) -> PlanError:
    problem = "what follows from it is used by a worker that does not have it"
    remedy = "let blocks hand on one tensor, and call the layers that the plan's example calls; or use num_workers=1"
    return PlanError("parallel", origin, problem, remedy)
