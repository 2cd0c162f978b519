"""An nn.Module from the registry's factory, and the versions of its weights.

Each version is the snapshot's own tensors: they are assigned, never copied into, so a batch that runs on an older
version is not disturbed, and a live version costs a fraction of a millisecond.

| run      | what a version is                    | why                                                             |
|----------|--------------------------------------|-----------------------------------------------------------------|
| eagerly  | a copy of the module that holds them | the cheapest call                                               |
| compiled | an argument of one compiled function | torch.compile ties a graph to the module object, not to tensors |
| graphed  | see `cuda_graphs`                    | a CUDA graph is tied to addresses                               |

A module that has no copy which stands by itself (see `copies`) is built anew for each version, and its weights are
copied into it. The one that others are copied from holds no weights, but those of a compiled or graphed one.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from shoal.errors import ConfigError, WeightsError
from shoal.registry.manifest import ModelFactory
from shoal.serve.model.formats.compiled import CompiledModule
from shoal.serve.model.formats.cuda_graphs import GraphedModule
from shoal.serve.model.formats.module_copy import can_reach, list_state_tensors
from shoal.serve.model.formats.template import Forward, TemplateConfig
from shoal.serve.model.formats.torch_forward import make_torch_forward
from shoal.serve.model.kernels import choose_kernels
from shoal.serve.model.precision import PrecisionConverter
from shoal.weights import WeightSnapshot

State = Mapping[str, Tensor]
logger = logging.getLogger(__name__)

_REMEDY = "leave it out, or let the module reach its weights through itself alone"


class ModuleTemplate:
    """Raises ConfigError when the factory does not give a module.

    A module that has a method `predict` is called by it, with the inputs by name, and gives a dict of tensors; one that
    has not is called as `forward(*inputs)` in the signature's order, and gives a tensor, a tuple or a dict.
    """

    def __init__(self, factory: ModelFactory, setting: TemplateConfig) -> None:
        self._factory, self._setting = factory, setting
        module = self._build_module()
        self._expected = {name: (tensor.shape, tensor.dtype) for name, tensor in module.state_dict().items()}
        # A mask may hold infinities on purpose, and then it does from the start.
        self._unbounded = {name for name, tensor in module.state_dict().items() if _count_not_finite(tensor)}
        self._by_name = callable(getattr(module, "predict", None))
        self._precision = self._prepare(module)
        self._bind = self._select_binding(module)

    def _build_module(self) -> nn.Module:
        module = self._factory.build()
        if not isinstance(module, nn.Module):
            name, given = self._factory.factory, type(module).__name__
            raise ConfigError("model.factory", name, f"gave {given}, not a torch nn.Module")
        return module.eval().requires_grad_(False)

    def _prepare(self, module: nn.Module) -> PrecisionConverter:
        """What a module becomes before it has the weights of a version: its precision, its kernels, its device."""
        precision = PrecisionConverter(self._setting.options.precision, module)
        if self._setting.device == "cpu" and not self._setting.options.compile:  # a compiler chooses its own
            choose_kernels(module)
        module.to(self._setting.device)
        return precision

    def _select_binding(self, module: nn.Module) -> Callable[[State], Callable[..., Any]]:
        """What makes a version of its state. Raises ConfigError for a module that cannot be run as is wanted."""
        options, own = self._setting.options, list_state_tensors(module)
        bare = _copy_without_weights(module)
        if options.compile:
            if bare is not None and can_reach(bare, own, barred=[module]):
                raise ConfigError("compile", True, "is not for a module that keeps its weights in a list", _REMEDY)
            return CompiledModule(module, self._setting, by_name=self._by_name).bind
        if options.cuda_graphs:
            _require_fixed(self._setting)
            if bare is None or can_reach(bare, [module]):
                raise ConfigError("cuda_graphs", True, "is not for a module that functions within it hold", _REMEDY)
            return GraphedModule(module, self._get_callable).bind
        if bare is None or can_reach(bare, [module, *own]):
            return self._bind_rebuilt
        return partial(self._bind_copy, bare)

    def load(self, snapshot: WeightSnapshot) -> Forward:
        snapshot.verify()
        try:
            tensors = safetensors.torch.load(snapshot.payload)  # in memory of their own; NumPy has no bfloat16
        except (SafetensorError, ValueError, KeyError) as error:
            raise WeightsError(f"weights version {snapshot.version} are not safetensors: {error}") from None
        self._check(snapshot.version, tensors)
        # In the module's order: a compiled graph is guarded by the order of its arguments, and a file has none.
        state = self._precision.convert({name: tensors[name] for name in self._expected})
        state = {name: tensor.to(self._setting.device) for name, tensor in state.items()}
        return make_torch_forward(self._bind(state), self._setting, by_name=self._by_name)

    def _bind_copy(self, bare: nn.Module, state: State) -> Callable[..., Any]:
        return self._get_callable(_copy_with_state(state, bare))

    def _bind_rebuilt(self, state: State) -> Callable[..., Any]:
        module = self._build_module()
        self._prepare(module)
        module.load_state_dict(state)
        return self._get_callable(module)

    def _get_callable(self, module: nn.Module) -> Callable[..., Any]:
        return module.predict if self._by_name else module  # type: ignore[return-value]

    def _check(self, version: int, state: State) -> None:
        for name in self._expected.keys() - state.keys():
            raise WeightsError(f"weights version {version}: {name!r} is missing")
        for name, tensor in state.items():
            if name not in self._expected:
                raise WeightsError(f"weights version {version}: the model has no {name!r}")
            shape, dtype = self._expected[name]
            if tensor.shape != shape or tensor.dtype != dtype:
                raise WeightsError(
                    f"weights version {version}: {name!r} is {tensor.dtype} {list(tensor.shape)}, "
                    f"the model has {dtype} {list(shape)}"
                )
            bad = _count_not_finite(tensor) if self._setting.options.finite and name not in self._unbounded else 0
            if bad:
                raise WeightsError(
                    f"weights version {version}: {name!r} is not finite: {bad} of its {tensor.numel()} values are"
                    " NaN or infinite. `finite: false` serves it all the same"
                )


def _copy_with_state(state: State, module: nn.Module) -> nn.Module:
    """A copy of the module that holds these tensors in the place of its own."""
    copied = copy.deepcopy(module, {id(tensor): tensor for tensor in list_state_tensors(module)})
    copied.load_state_dict(state, assign=True)
    return copied.requires_grad_(False)


def _copy_without_weights(module: nn.Module) -> nn.Module | None:
    """A copy without weights; None for a module that cannot be copied (`torch.nn.utils.weight_norm` makes such)."""
    try:
        return _copy_with_state({name: tensor.to("meta") for name, tensor in module.state_dict().items()}, module)
    except (RuntimeError, TypeError) as error:  # of torch, and of what is in no pickle either
        logger.info("the module is built anew for each version, since it cannot be copied: %s", error)
        return None


def _require_fixed(setting: TemplateConfig) -> None:
    for spec in setting.signature.inputs:
        if -1 in spec.shape[1:]:
            problem = f"needs a graph for each size of {spec.name!r}, which is {spec.datatype} {spec.shape}"
            raise ConfigError("cuda_graphs", True, problem, "leave it out, or let only the batch be of any size")


def _count_not_finite(tensor: Tensor) -> int:
    if not tensor.is_floating_point() or math.isfinite(tensor.sum()):  # what is not finite stays so in a sum
        return 0
    return tensor.numel() - int(torch.isfinite(tensor).sum())
