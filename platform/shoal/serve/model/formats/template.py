"""What every format gives the predictor: a template that loads versions, and a forward for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shoal.registry.manifest import Signature, TensorSignature
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

Arrays = Mapping[str, np.ndarray]
Forward = Callable[[Arrays], Arrays]  # one whole batch in, in the model's order; outputs by name, in their own memory


class Template(Protocol):
    """One model without its weights. Immutable to its users: `load` may be called from any thread."""

    def load(self, snapshot: WeightSnapshot) -> Forward:
        """The forward of one version; earlier ones go on as they are. Raises WeightsError when it does not fit."""
        ...


@dataclass(frozen=True)
class TemplateConfig:
    """How a template runs: the model's signature and options, the device that was chosen, the threads of a forward, and
    whether code of the user's prepares its inputs, and makes an answer of what it gives."""

    signature: Signature
    options: ModelOptions
    device: str  # cpu or cuda
    torch_threads: int
    has_preprocess: bool = False
    has_postprocess: bool = False

    @property
    def bf16_inputs(self) -> frozenset[str]:
        """Those that arrive as the bits of bfloat16; a preprocessing gives arrays that NumPy knows."""
        if self.has_preprocess:
            return frozenset()
        return frozenset(spec.name for spec in self.signature.inputs if spec.datatype == "BF16")

    @property
    def outputs(self) -> tuple[TensorSignature, ...] | None:
        """What the model itself gives; None when that is for a postprocessing alone to know."""
        return None if self.has_postprocess else tuple(self.signature.outputs)
