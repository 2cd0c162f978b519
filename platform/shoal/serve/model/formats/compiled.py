"""torch.compile for weights that change: the tensors of a version are arguments of the compiled function.

Called by `module`. A graph compiled for a module object would be guarded by that object and compiled again for the next
version. Argument tensors of equal shapes and dtypes fit the present graph. So any number of versions share one graph,
none is ever written to, and no lock is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.serve.model.formats.template import TemplateConfig


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
