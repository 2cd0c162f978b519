"""An nn.Module from the registry's factory, and the versions of its weights.

Each version gets a module object of its own whose parameters and buffers are the snapshot's: they are assigned, never
copied into, so a batch that runs on an older version is not disturbed, and a live version costs a fraction of a
millisecond.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, WeightsError
from shoal.registry.manifest import ModelFactory, Signature
from shoal.serve.formats.template import Arrays, Forward
from shoal.weights import WeightSnapshot


class ModuleTemplate:
    """Raises ConfigError when the factory does not give a module.

    A module that has a method `predict` is called by it, with the inputs by name, and gives a dict of tensors; one that
    has not is called as `forward(*inputs)` in the signature's order, and gives a tensor, a tuple or a dict.
    """

    def __init__(self, factory: ModelFactory, signature: Signature) -> None:
        module = factory.build()
        if not isinstance(module, nn.Module):
            raise ConfigError("model.factory", factory.factory, f"gave {type(module).__name__}, not a torch nn.Module")
        self._module = module.eval().requires_grad_(False)
        self._expected = dict(module.state_dict())
        self._by_name = callable(getattr(module, "predict", None))
        self._output_names = [spec.name for spec in signature.outputs]

    def load(self, snapshot: WeightSnapshot) -> Forward:
        state = {name: torch.from_numpy(_writable(array)) for name, array in snapshot.tensors().items()}
        check_state(snapshot.version, state, self._expected)
        shared = {id(tensor): tensor for tensor in self._module.state_dict(keep_vars=True).values()}
        module = copy.deepcopy(self._module, shared)
        module.load_state_dict(state, assign=True)
        return self._forward(module.eval().requires_grad_(False))

    def _forward(self, module: nn.Module) -> Forward:
        call: Callable[..., Any] = module.predict if self._by_name else module  # type: ignore[assignment]
        by_name, names = self._by_name, self._output_names
        inference_mode = torch.inference_mode

        def forward(inputs: Arrays) -> Arrays:
            tensors = {name: torch.from_numpy(_writable(array)) for name, array in inputs.items()}
            with inference_mode():
                result = call(**tensors) if by_name else call(*tensors.values())
            return {name: value.numpy() for name, value in named(result, names).items()}

        return forward


def named(result: Any, names: list[str]) -> Mapping[str, Tensor]:
    """A model's result by output name: a dict as it is, a tensor or a tuple in the signature's order."""
    if isinstance(result, Mapping):
        return {name: result[name] for name in names if name in result}
    return dict(zip(names, (result,) if isinstance(result, Tensor) else result, strict=False))


def check_state(version: int, state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises WeightsError for the first tensor that is missing, unknown, or of another shape or dtype."""
    for name in expected.keys() - state.keys():
        raise WeightsError(f"weights version {version}: {name!r} is missing")
    for name, tensor in state.items():
        if name not in expected:
            raise WeightsError(f"weights version {version}: the model has no {name!r}")
        want = expected[name]
        if tensor.shape != want.shape or tensor.dtype != want.dtype:
            raise WeightsError(
                f"weights version {version}: {name!r} is {tensor.dtype} {list(tensor.shape)}, "
                f"the model has {want.dtype} {list(want.shape)}"
            )


def _writable(array: np.ndarray) -> np.ndarray:
    """torch has no tensors that cannot be written to."""
    return array if array.flags.writeable else array.copy()
