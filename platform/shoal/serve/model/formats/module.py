"""An nn.Module from the registry's factory, and the versions of its weights.

Each version is the snapshot's own tensors: they are assigned, never copied into, so a batch that runs on an older
version is not disturbed, and a live version costs a fraction of a millisecond.

| run      | what a version is                    | why                                                             |
|----------|--------------------------------------|-----------------------------------------------------------------|
| eagerly  | a copy of the module that holds them | the cheapest call                                               |
| compiled | an argument of one compiled function | torch.compile ties a graph to the module object, not to tensors |
| graphed  | see `cuda_graphs`                    | a CUDA graph is tied to addresses                               |
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from shoal.errors import ConfigError, WeightsError
from shoal.registry.manifest import ModelFactory
from shoal.serve.model.formats.compiled import CompiledModule
from shoal.serve.model.formats.cuda_graphs import GraphedModule
from shoal.serve.model.formats.template import Forward, Setting
from shoal.serve.model.formats.torch_forward import torch_forward
from shoal.serve.model.kernels import choose_kernels
from shoal.serve.model.precision import Precision
from shoal.weights import WeightSnapshot

State = Mapping[str, Tensor]


class ModuleTemplate:
    """Raises ConfigError when the factory does not give a module.

    A module that has a method `predict` is called by it, with the inputs by name, and gives a dict of tensors; one that
    has not is called as `forward(*inputs)` in the signature's order, and gives a tensor, a tuple or a dict.
    """

    def __init__(self, factory: ModelFactory, setting: Setting) -> None:
        module = factory.build()
        if not isinstance(module, nn.Module):
            raise ConfigError("model.factory", factory.factory, f"gave {type(module).__name__}, not a torch nn.Module")
        module.eval().requires_grad_(False)
        self._expected = {name: (tensor.shape, tensor.dtype) for name, tensor in module.state_dict().items()}
        # A mask may hold infinities on purpose, and then it does from the start.
        self._unbounded = {name for name, tensor in module.state_dict().items() if _num_not_finite(tensor)}
        self._setting, self._by_name = setting, callable(getattr(module, "predict", None))
        self._precision = Precision(setting.options.precision, module)
        if setting.device == "cpu" and not setting.options.compile:  # a compiler chooses its own
            choose_kernels(module)
        self._module = module.to(setting.device)
        self._bind: Callable[[State], Callable[..., Any]] = self._eager
        if setting.options.compile:
            self._bind = CompiledModule(module, setting, by_name=self._by_name).bind
        elif setting.options.cuda_graphs:
            _require_fixed(setting)
            self._bind = GraphedModule(module, self._called).bind

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
        return torch_forward(self._bind(state), self._setting, by_name=self._by_name)

    def _eager(self, state: State) -> Callable[..., Any]:
        shared = {id(tensor): tensor for tensor in self._module.state_dict(keep_vars=True).values()}
        module = copy.deepcopy(self._module, shared)
        module.load_state_dict(state, assign=True)
        return self._called(module.requires_grad_(False))

    def _called(self, module: nn.Module) -> Callable[..., Any]:
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
            bad = _num_not_finite(tensor) if self._setting.options.finite and name not in self._unbounded else 0
            if bad:
                raise WeightsError(
                    f"weights version {version}: {name!r} is not finite: {bad} of its {tensor.numel()} values are"
                    " NaN or infinite. `finite: false` serves it all the same"
                )


def _require_fixed(setting: Setting) -> None:
    for spec in setting.signature.inputs:
        if -1 in spec.shape[1:]:
            problem = f"needs a graph for each size of {spec.name!r}, which is {spec.datatype} {spec.shape}"
            raise ConfigError("cuda_graphs", True, problem, "leave it out, or let only the batch be of any size")


def _num_not_finite(tensor: Tensor) -> int:
    if not tensor.is_floating_point() or math.isfinite(tensor.sum()):  # what is not finite stays so in a sum
        return 0
    return tensor.numel() - int(torch.isfinite(tensor).sum())
