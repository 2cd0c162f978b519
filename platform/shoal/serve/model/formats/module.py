"""An nn.Module from the registry's factory, with the versions of its weights.

A version is the snapshot's own tensors. They are assigned, never copied into, so a batch on an older version is not
disturbed, and a live version costs a fraction of a millisecond.

| run      | a version                            | why                                                             |
|----------|--------------------------------------|-----------------------------------------------------------------|
| eagerly  | a copy of the module that holds them | the cheapest call                                               |
| compiled | an argument of one compiled function | torch.compile ties a graph to the module object, not to tensors |
| graphed  | see `cuda_graphs`                    | a CUDA graph is tied to addresses                               |

With both options the compiled function is what a graph captures, with the tensors at its addresses.

A module without an independent copy (see `_can_reach`) is rebuilt for each version, and the weights are copied into
it. The original module has no weights, except a compiled or graphed one.
"""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.errors import ConfigError, WeightsError
from shoal.serve.model.formats.cuda_graphs import GraphedModule
from shoal.serve.model.formats.template import Forward, TemplateConfig
from shoal.serve.model.formats.torch_forward import choose_kernels, make_torch_forward
from shoal.serve.model.precision import Int8Linear, PrecisionConverter
from shoal.weights import WeightSnapshot
from shoal.weights.tensor_files import read_tensors

State = Mapping[str, Tensor]
logger = logging.getLogger(__name__)

_REMEDY = "leave it out, or let the module reach its weights through itself alone"


class ModuleTemplate:
    """The template of a module. Raises ConfigError when the factory does not return a module.

    A module with a method `predict` is called by it, with the inputs by name, and returns a dict of tensors. Any other
    is called as `forward(*inputs)` in the signature's order, or with what a preprocessing hook gave by the names of its
    parameters where they have these names. It returns a tensor, a tuple or a dict.
    """

    def __init__(self, setting: TemplateConfig) -> None:
        self._setting = setting
        module = self._build_module()
        self._expected = {name: (tensor.shape, tensor.dtype) for name, tensor in module.state_dict().items()}
        # A mask may contain infinities on purpose, and then has them from the start.
        self._unbounded = {name for name, tensor in module.state_dict().items() if _count_not_finite(tensor)}
        self._has_int8 = any(isinstance(layer, Int8Linear) for layer in module.modules())  # registered so
        self._by_name = callable(getattr(module, "predict", None))
        self._names = frozenset(inspect.signature(module.forward).parameters)
        self._precision = self._prepare(module)
        self._bind = self._select_binding(module)

    def _build_module(self) -> nn.Module:
        module = self._setting.factory.build()
        if not isinstance(module, nn.Module):
            name, given = self._setting.factory.factory, type(module).__name__
            raise ConfigError("model.factory", name, f"gave {given}, not a torch nn.Module")
        return module.eval().requires_grad_(False)

    def _prepare(self, module: nn.Module) -> PrecisionConverter:
        """Prepare a module for the weights of a version: its precision and kernels."""
        precision = PrecisionConverter(self._setting.options.precision, module)
        if self._setting.device == "cpu" and not self._setting.options.compile:  # a compiler chooses its own
            choose_kernels(module)
        return precision

    def _select_binding(self, module: nn.Module) -> Callable[[State], Callable[..., Any]]:
        """Select the function that binds a version's state. Raises ConfigError for a module that cannot run in the
        requested way."""
        options, own = self._setting.options, _list_state_tensors(module)
        bare = _copy_without_weights(module)
        get_callable: Callable[[nn.Module], Callable[..., Any]] = self._get_callable
        if options.compile or options.cuda_graphs:
            module.to(self._setting.device)
        if options.compile:
            if bare is not None and _can_reach(bare, own, barred=[module]):
                raise ConfigError("compile", True, "is not for a module that keeps its weights in a list", _REMEDY)
            compiled = CompiledModule(module, self._setting, by_name=self._by_name)
            if not options.cuda_graphs:
                return compiled.bind
            get_callable = lambda slot: compiled.bind(slot.state_dict())  # noqa: E731
        if options.cuda_graphs:
            for spec in self._setting.signature.inputs:
                if -1 in spec.shape[1:] and not self._setting.has_preprocess:
                    problem = f"needs a graph for each size of {spec.name!r}, which is {spec.datatype} {spec.shape}"
                    raise ConfigError(
                        "cuda_graphs", True, problem, "leave it out, or let only the batch be of any size"
                    )
            if bare is None or _can_reach(bare, [module]):
                raise ConfigError("cuda_graphs", True, "is not for a module that functions within it hold", _REMEDY)
            return GraphedModule(module, get_callable).bind
        if bare is None or _can_reach(bare, [module, *own]):
            return self._bind_rebuilt
        # What is in no state is alike in all versions; weights of the template's own have no use there.
        bare._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(self._setting.device))
        return lambda state: self._get_callable(_copy_with_state(state, bare))

    def load(self, snapshot: WeightSnapshot) -> Forward:
        if self._has_int8 and self._setting.device != "cpu":
            problem = "has int8 layers, which compute on the CPU alone: set device: cpu, or auto"
            raise WeightsError(f"version {snapshot.version} {problem}")
        tensors = read_tensors(snapshot)
        check_names(snapshot.version, self._expected, tensors)
        for name, tensor in tensors.items():
            check_shape(snapshot.version, name, (tensor.shape, tensor.dtype), self._expected[name])
            if self._setting.options.finite and name not in self._unbounded:
                check_finite(snapshot.version, name, tensor)
        # In the module's order: a compiled graph is guarded by the order of its arguments, and a file has none.
        state = self._precision.convert({name: tensors[name] for name in self._expected})
        state = {name: tensor.to(self._setting.device) for name, tensor in state.items()}
        bound = self._bind(state)
        forward = make_torch_forward(bound, self._setting, by_name=self._by_name, names=self._names)
        if isinstance(bound, nn.Module) and self._setting.options.precision != "int8":
            forward.module = bound  # type: ignore[attr-defined]
        return forward

    def _bind_rebuilt(self, state: State) -> Callable[..., Any]:
        module = self._build_module()
        self._prepare(module)
        module.to(self._setting.device)
        module.load_state_dict(state)
        return self._get_callable(module)

    def _get_callable(self, module: nn.Module) -> Callable[..., Any]:
        return module.predict if self._by_name else module  # type: ignore[return-value]


def check_names(version: int, expected: Collection[str], found: Collection[str]) -> None:
    """Raises WeightsError, naming a tensor that a version lacks, or that the model does."""
    for name in expected:
        if name not in found:
            raise WeightsError(f"weights version {version}: {name!r} is missing")
    for name in found:
        if name not in expected:
            raise WeightsError(f"weights version {version}: the model has no {name!r}")


def check_shape(
    version: int, name: str, found: tuple[torch.Size, torch.dtype], expected: tuple[torch.Size, torch.dtype]
) -> None:
    """Raises WeightsError for a tensor of another shape or type."""
    if found != expected:
        there, own = (f"{dtype} {list(shape)}" for shape, dtype in (found, expected))
        raise WeightsError(f"weights version {version}: {name!r} is {there}, the model has {own}")


def check_finite(version: int, name: str, tensor: Tensor) -> None:
    """Raises WeightsError for a tensor with NaN or infinity."""
    if bad := _count_not_finite(tensor):
        problem = f"{name!r} is not finite: {bad} of its {tensor.numel()} values are NaN or infinite"
        raise WeightsError(f"weights version {version}: {problem}. `finite: false` serves it all the same")


def _copy_with_state(state: State, module: nn.Module) -> nn.Module:
    """Copy the module with these tensors in place of its own."""
    shared = (*_list_state_tensors(module), *module.buffers())  # frozen weights are alike in all versions
    copied = copy.deepcopy(module, {id(tensor): tensor for tensor in shared})
    copied.load_state_dict(state, assign=True)
    return copied.requires_grad_(False)


def _copy_without_weights(module: nn.Module) -> nn.Module | None:
    """Copy the module without weights; None for one that cannot be copied (as by `torch.nn.utils.weight_norm`)."""
    try:
        return _copy_with_state({name: tensor.to("meta") for name, tensor in module.state_dict().items()}, module)
    except (RuntimeError, TypeError) as error:  # of torch, and of values that cannot be pickled
        logger.info("the module is rebuilt for each version, since it cannot be copied: %s", error)
        return None


def _list_state_tensors(module: nn.Module) -> list[Tensor]:
    """The tensors that a version replaces: parameters and buffers."""
    return [*module.state_dict(keep_vars=True).values()]


def _can_reach(copied: nn.Module, sought: Iterable[object], *, barred: Iterable[object] = ()) -> bool:
    """Whether one of the `sought` objects can be reached from a copy without passing a `barred` one.

    Python does not copy a function's closure, and a tensor that a module stores outside its parameters is not the
    parameter that replaces it: a copy that reaches its weights by either would compute with the original's. The globals
    of a function's file are not part of the copy.
    """
    wanted, seen = set(map(id, sought)), set(map(id, barred))
    ahead: list[Any] = [copied]
    while ahead:
        each = ahead.pop()
        if id(each) in wanted:
            return True
        if id(each) in seen or isinstance(each, (type, ModuleType)):  # which lead to every other object
            continue
        seen.add(id(each))
        if isinstance(each, FunctionType):
            ahead += (each.__closure__, each.__defaults__, each.__kwdefaults__, each.__dict__)
        else:
            ahead += gc.get_referents(each)
    return False


def _count_not_finite(tensor: Tensor) -> int:
    if not tensor.is_floating_point() or math.isfinite(tensor.sum()):  # NaN or infinity carries into a sum
        return 0
    return tensor.numel() - int(torch.isfinite(tensor).sum())


class CompiledModule:
    """Compiles at the first call, and again for the first batch of another size: two graphs, for one row and for any
    number. The warm-up compiles both."""

    def __init__(self, module: nn.Module, setting: TemplateConfig, *, by_name: bool) -> None:
        target = _Predict(module) if by_name else module
        prefix = "module." if by_name else ""
        self._variable = [[i for i, size in enumerate(spec.shape) if size == -1] for spec in setting.signature.inputs]
        if setting.has_preprocess:  # the module's inputs are the hook's, of which the rows alone are known
            self._variable = [[0]] * len(inspect.signature(module.forward).parameters)
        self._names = {name: f"{prefix}{name}" for name in module.state_dict()}

        def call(state: Mapping[str, Tensor], args: tuple[Any, ...], inputs: Mapping[str, Any]) -> Any:
            return functional_call(target, dict(state), args, dict(inputs))

        # torch retains at most eight compiled graphs per code object, so each model has its own.
        own = FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)
        self._call = torch.compile(own)

    def bind(self, state: Mapping[str, Tensor]) -> Callable[..., Any]:
        """Bind the compiled function to the weights of one version."""
        weights = {self._names[name]: tensor for name, tensor in state.items()}
        compiled, variable = self._call, self._variable

        def call(*args: Tensor, **inputs: Tensor) -> Any:
            for tensor, dimensions in zip(args or inputs.values(), variable, strict=False):
                for dimension in dimensions if isinstance(tensor, Tensor) else ():  # BYTES are none
                    torch._dynamo.maybe_mark_dynamic(tensor, dimension)
            return compiled(weights, args, inputs)

        return call


class _Predict(nn.Module):
    """A module whose `forward` is the other's `predict`, for functional_call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Tensor) -> Any:
        return self.module.predict(**inputs)  # type: ignore[operator]
