"""Any registered model as a function of batches: load a version, ask it, get exactly what its signature promises.

Owns what one model costs and promises: the template that versions are loaded into, and the checks of what it gives.
Called by the table of versions (`load`), by the batcher's threads (`enter_thread`, `predict_batch`) and by batch
prediction; never reads a source, a socket or a clock. A loaded version never changes and shares nothing that a later
one overwrites, so a batch is computed by one version or not at all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from shoal.errors import InferenceError
from shoal.registry.manifest import ModelFactory, Signature, TensorSignature
from shoal.serve.call import Arrays
from shoal.serve.formats import Forward
from shoal.serve.formats.module import ModuleTemplate
from shoal.serve.options import ModelOptions
from shoal.weights import WeightSnapshot


@dataclass(frozen=True)
class ModelPackage:
    """All that a replica needs of a model: how to build it, how to call it, and its weights if there are any yet."""

    factory: ModelFactory
    signature: Signature
    snapshot: WeightSnapshot | None = None


class Predictor:
    """The template of one model. Raises ConfigError when it cannot be built, or not with these options."""

    def __init__(
        self, factory: ModelFactory, signature: Signature, options: ModelOptions, torch_threads: int = 1
    ) -> None:
        self.signature, self.options, self.torch_threads = signature, options, torch_threads
        self._template = ModuleTemplate(factory, signature)
        self._variable = [spec.name for spec in signature.inputs if -1 in spec.shape[1:]]

    def enter_thread(self) -> None:
        """Fix the number of torch threads; they are counted per calling thread, so call this in the forward's."""
        torch.set_num_threads(self.torch_threads)

    def load(self, snapshot: WeightSnapshot) -> LoadedModel:
        """A version, warm. Raises WeightsError when it does not fit, and then nothing has changed."""
        return LoadedModel(snapshot.version, self._template.load(snapshot), self.signature, self.options)

    def bucket(self, inputs: Arrays) -> Hashable:
        """What requests must have in common to share a batch: their shapes where those may differ."""
        if not self._variable:
            return None
        return tuple(inputs[name].shape[1:] for name in self._variable)


class LoadedModel:
    """One version of a model, ready to answer. Immutable; any number of threads may ask it."""

    def __init__(self, version: int, forward: Forward, signature: Signature, options: ModelOptions) -> None:
        self.version = version
        self._forward, self._finite = forward, options.finite
        self._input_names = [spec.name for spec in signature.inputs]
        self._outputs = signature.outputs

    def predict_batch(self, requests: Sequence[Arrays]) -> list[dict[str, np.ndarray]]:
        """The answers to several requests, computed as one batch along the first dimension.

        Raises InferenceError (500) naming the output that does not fit the signature, or what the model raised.
        """
        first = requests[0]
        if len(requests) == 1:
            inputs = {name: first[name] for name in self._input_names}
            return [self._checked(self._forward(inputs), len(first[self._input_names[0]]))]
        inputs = {name: np.concatenate([request[name] for request in requests]) for name in self._input_names}
        bounds = [0, *accumulate([len(request[self._input_names[0]]) for request in requests])]
        outputs = self._checked(self._forward(inputs), bounds[-1])
        return [{name: rows[start:end] for name, rows in outputs.items()} for start, end in pairwise(bounds)]

    def _checked(self, found: Arrays, num_rows: int) -> dict[str, np.ndarray]:
        outputs = {}
        for spec in self._outputs:
            if spec.name not in found:
                raise InferenceError(500, f"the model gave no output {spec.name!r}")
            outputs[spec.name] = array = found[spec.name]
            if not _fits(array, spec, num_rows):
                expected = [num_rows, *spec.shape[1:]]
                raise InferenceError(500, f"output {spec.name!r}: expected {expected}, the model gave {[*array.shape]}")
            if self._finite and array.dtype.kind == "f" and not np.isfinite(array).all():
                raise InferenceError(500, f"output {spec.name!r} is not finite")
        return outputs


def _fits(array: np.ndarray, spec: TensorSignature, num_rows: int) -> bool:
    return len(array) == num_rows and len(array.shape) == len(spec.shape) and all(
        want in (-1, have) for have, want in zip(array.shape[1:], spec.shape[1:], strict=True)
    )  # fmt: skip
