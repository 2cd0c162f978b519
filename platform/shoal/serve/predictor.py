"""A module and the weights it answers with: the next version is staged beside the one that serves, then flipped in.

Owns the served nn.Module. Called by the batcher's thread (`predict_batch`) and by whoever follows the weights (`stage`,
`flip`); never reads a source, a socket or a clock. Each version gets a module of its own, so that a batch that still
runs on the old one is never disturbed, and `flip` is one assignment, read once per batch: no mixture is possible.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.errors import ConfigError, InferenceError, WeightsError
from shoal.registry.manifest import ModelFactory, Signature
from shoal.weights import WeightSnapshot

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Prediction:
    """The outputs for one request, and the version of the weights that made all of them."""

    outputs: dict[str, np.ndarray]
    version: int


@dataclass(frozen=True)
class _Loaded:
    """A module with the weights of one version in it."""

    module: nn.Module
    version: int


class Predictor:
    """Answers batches with the newest weights that were flipped in.

    The module is called as `predict(**inputs)` when it has such a method (a dict of tensors by output name), else as
    `forward(*inputs)` in the signature's order; a tensor, a tuple or a dict is taken for the signature's outputs.
    Until weights are flipped in, `predict_batch` raises InferenceError (503).
    """

    def __init__(self, factory: ModelFactory, signature: Signature, torch_threads: int = 1) -> None:
        """Build the module. Raises ConfigError when the factory does not give one."""
        module = factory.build()
        if not isinstance(module, nn.Module):
            raise ConfigError("model.factory", factory.factory, f"gave {type(module).__name__}, not a torch nn.Module")
        self.signature = signature
        self.torch_threads = torch_threads
        self._template = module.eval().requires_grad_(False)
        self._expected = dict(self._template.state_dict())
        self._staged: _Loaded | None = None
        self._serving: _Loaded | None = None

    @property
    def version(self) -> int:
        """The version that answers the next batch; 0 before the first."""
        serving = self._serving
        return serving.version if serving else 0

    def enter_thread(self) -> None:
        """Fix the number of torch threads; they are counted per calling thread, so call this in the forward's."""
        torch.set_num_threads(self.torch_threads)

    def stage(self, snapshot: WeightSnapshot) -> None:
        """Load a version beside the one that serves. Raises WeightsError, and then nothing has changed."""
        state = {name: torch.from_numpy(_writable(array)) for name, array in snapshot.tensors().items()}
        self._check(snapshot.version, state)
        # Parameters and buffers are assigned, not copied into: sharing them with the template costs nothing.
        shared = {id(tensor): tensor for tensor in self._template.state_dict(keep_vars=True).values()}
        module = copy.deepcopy(self._template, shared)
        module.load_state_dict(state, assign=True)
        self._staged = _Loaded(module.eval().requires_grad_(False), snapshot.version)

    def flip(self) -> int:
        """Let the staged version answer from the next batch on; the version that serves now."""
        if self._staged is not None:
            self._serving, self._staged = self._staged, None
        return self.version

    def predict(self, inputs: Arrays) -> Prediction:
        """One request, or one batch, as it stands. Raises InferenceError: 503 without weights, 500 for bad outputs."""
        serving = self._serving
        if serving is None:
            raise InferenceError(503, "no weights have been loaded yet; try again later")
        tensors = {spec.name: torch.from_numpy(inputs[spec.name]) for spec in self.signature.inputs}
        with torch.inference_mode():
            predict = getattr(serving.module, "predict", None)
            result = predict(**tensors) if callable(predict) else serving.module(*tensors.values())
        return Prediction(self._outputs(result), serving.version)

    def predict_batch(self, requests: Sequence[Arrays]) -> list[Prediction]:
        """The answers to several requests, computed as one batch along the first dimension."""
        if len(requests) == 1:
            return [self.predict(requests[0])]
        names = [spec.name for spec in self.signature.inputs]
        prediction = self.predict({name: np.concatenate([request[name] for request in requests]) for name in names})
        bounds = [0, *accumulate([len(request[names[0]]) for request in requests])]
        for name, rows in prediction.outputs.items():
            if len(rows) != bounds[-1]:
                raise InferenceError(500, f"output {name!r} has {len(rows)} rows for {bounds[-1]} rows of input")
        return [
            Prediction({name: rows[start:end] for name, rows in prediction.outputs.items()}, prediction.version)
            for start, end in pairwise(bounds)
        ]

    def _outputs(self, result: Any) -> dict[str, np.ndarray]:
        specs = self.signature.outputs
        if isinstance(result, torch.Tensor):
            result = (result,)
        if not isinstance(result, Mapping):
            result = dict(zip([spec.name for spec in specs], result, strict=False))
        missing = [spec.name for spec in specs if spec.name not in result]
        if missing:
            raise InferenceError(500, f"the model gave no output {missing[0]!r}")
        return {spec.name: result[spec.name].numpy() for spec in specs}

    def _check(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        expected = self._expected
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
    return array if array.flags.writeable else array.copy()
