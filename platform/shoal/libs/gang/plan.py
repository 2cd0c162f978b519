"""How a model is split between the workers of a replica: by training's own plans, found without the weights.

Called by `template` in the replica, which sends the plan to the workers. The model is built with parameters that have
no memory; the plan is found on an example, as training finds it on a batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.batch_tree import tensors_of
from shoal.errors import ConfigError, PlanError, ShoalError, summarize_error
from shoal.extend.parallel import (
    Loss,
    StageForward,
    StagePartition,
    TensorPlan,
    build_skeleton,
    build_stage_slices,
    expand_constant,
    find_partition,
    find_tensor_plan,
    set_parameters,
)
from shoal.extend.registry import ModelFactory
from shoal.extend.serve import Arrays, GangSplit, to_tensor

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
            for each in pytree.tree_leaves(result):
                if type(each) is AbsentTensor:
                    each.__class__ = Tensor  # type: ignore[assignment]
            return result
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


class Stage(StageForward):
    """One stage of a model, whose other parameters are without memory.

    Set the parameters that it has before, or after.
    """

    def __init__(self, model: nn.Module, stages: StagePartition, rank: int) -> None:
        modules = {call.module: model.get_submodule(call.module) for call in stages.calls}
        watched = {name for name, each in modules.items() if any(True for _ in each.parameters(recurse=False))}
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
        placeholder = super().make_placeholder(name, *call)
        return pytree.tree_map_only(Tensor, lambda each: mark_absent(each, name), placeholder)

    def call_ungated(self, *call: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # for the shapes of its results alone
            return super().call_ungated(*call)


def make_absent(name: str, parameter: Tensor) -> Tensor:
    """The stand-in of a parameter that another worker has."""
    return mark_absent(expand_constant(parameter, 0.0).detach(), name)


def check_stages(model: nn.Module, stages: StagePartition, inputs: tuple[Any, ...], value: float) -> None:
    """Run all stages on an example, whose parameters are `value`. Raises PlanError when an output, an integer too,
    depends on what another stage has."""
    received: Tensor | None = None
    for rank in range(len(stages.split_points) + 1):
        values = {
            name: (expand_constant(each, value) if rank in stages.parameters[name] else make_absent(name, each))
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


WEIGHT = 0.02  # of every parameter: sums are finite, and not zero


@dataclass(frozen=True)
class GangPlan:
    """One of the two, for `num_workers`."""

    num_workers: int
    stages: StagePartition | None = None
    layers: TensorPlan | None = None


class _Example:
    """A plan's view of a model that answers: the example is its batch, and any use of an output counts as its loss."""

    def __init__(self, inputs: tuple[Any, ...], needs_gradient: bool) -> None:
        self._inputs, self._needs_gradient = inputs, needs_gradient

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return self._inputs

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        losses = [each.double().mean() for each in tensors_of(outputs) if each.is_floating_point()]
        if not losses or (
            self._needs_gradient and torch.is_grad_enabled() and not any(e.requires_grad for e in losses)
        ):
            problem = "a plan follows the gradients of floating-point outputs, and the model gives none that has one"
            remedy = "let it return floats too, such as its logits, without torch.no_grad; or use num_workers=1"
            raise PlanError("parallel", "outputs", problem, remedy)
        return torch.stack(losses).sum()

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Loss]:
        return {}

    def tensor_plan(self) -> dict[str, str] | None:
        return None

    def pipeline_cuts(self) -> list[str] | None:
        return None


def build_model(factory: ModelFactory) -> nn.Module:
    """Build the model without its parameters. Raises ConfigError."""

    def build() -> nn.Module:
        module = factory.build()
        if not isinstance(module, nn.Module) or callable(getattr(module, "predict", None)):
            problem = "gives no nn.Module that is called by its forward, as workers that share a model need"
            raise ConfigError("model.factory", factory.factory, problem, "serve it with num_workers=1")
        return module

    return build_skeleton(build)


def to_inputs(arrays: Arrays, bf16: Collection[str]) -> tuple[Any, ...]:
    """A model's inputs as it gets them; those of BYTES stay arrays.

    bf16: the names of those that are bits of bfloat16
    """
    inputs = {name: to_tensor(array, copies=False) for name, array in arrays.items()}
    return tuple(each.view(torch.bfloat16) if name in bf16 else each for name, each in inputs.items())


def find_plan(
    factory: ModelFactory, example: Arrays, split: GangSplit, num_workers: int, bf16: Collection[str] = ()
) -> GangPlan:
    """Find the plan. Raises PlanError, also when the model fails on the example; and ConfigError.

    example: inputs in the model's order and shapes
    bf16:    the names of those that are bits of bfloat16
    """
    model = build_model(factory)
    set_parameters(model, {name: expand_constant(each, WEIGHT) for name, each in model.named_parameters()})
    learnable = _Example(to_inputs(example, bf16), split == "pipeline")
    try:
        if split == "tensor":
            return GangPlan(num_workers, layers=find_tensor_plan(model, learnable, num_workers, ()))
        stages = find_partition(model, learnable, (), num_workers, torch.device("cpu"), has_weights=False)
        check_stages(model, stages, learnable.inputs(()), WEIGHT)
        return GangPlan(num_workers, stages)
    except ShoalError:
        raise
    except Exception as error:  # any error of the user's module
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in example.items())
        problem = f"the model fails on the example ({shapes}) on which its plan is found: {summarize_error(error)}"
        remedy = "give its signature the sizes that it takes, in place of -1; or use num_workers=1"
        raise PlanError("parallel", split, problem, remedy) from error
