"""The interface of a format: a template that loads versions, and a forward for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shoal.registry.manifest import ModelFactory, Signature, TensorSignature
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

Arrays = Mapping[str, np.ndarray]
Forward = Callable[[Arrays], Arrays]  # takes a batch in the model's order; returns outputs by name, in their own memory


class InputLimits(Protocol):
    """The sizes of inputs that a version takes, which the served model checks. A forward may have some as `limits`."""

    def check(self, inputs: Arrays) -> None:
        """Check a request's inputs, batch-first. Raises InferenceError (422)."""
        ...


class Template(Protocol):
    """One model without its weights. Immutable to its users: `load` may be called from any thread."""

    def load(self, snapshot: WeightSnapshot) -> Forward:
        """Load one version's forward; earlier ones are unaffected. Raises WeightsError when it does not fit."""
        ...


@dataclass(frozen=True)
class TemplateConfig:
    """A template's configuration: the model and how it is built, its options, the selected device, the threads of a
    forward, and whether the user has a pre- and a postprocessing hook."""

    factory: ModelFactory
    signature: Signature
    options: ModelOptions
    device: str  # cpu or cuda
    torch_threads: int
    has_preprocess: bool = False
    has_postprocess: bool = False

    @property
    def bf16_inputs(self) -> frozenset[str]:
        """The inputs that arrive as bits of bfloat16; a preprocessing hook returns NumPy's own types."""
        if self.has_preprocess:
            return frozenset()
        return frozenset(spec.name for spec in self.signature.inputs if spec.datatype == "BF16")

    @property
    def outputs(self) -> tuple[TensorSignature, ...] | None:
        """The model's own outputs; None when only the postprocessing hook knows them."""
        return None if self.has_postprocess else tuple(self.signature.outputs)
