"""What is known about one registered model version: the manifest, and how to build and call the model.

Owns the specs that are written beside the weights as `manifest.json`. Called by the registry, by jobs that register a
model and by the endpoints that serve one. Never reads or writes a file, and imports torch only if a factory does.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

from pydantic import ConfigDict, Field, field_validator

from shoal.config import Spec
from shoal.errors import ConfigError

# The names of the Open Inference Protocol v2, and BF16, which has become common since.
DATATYPES = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "BF16", "FP32", "FP64", "BYTES"),
)


class TensorSignature(Spec):
    """One input or output of a model.

    name:     what requests call it
    datatype: a name of the Open Inference Protocol v2, such as FP32
    shape:    the first dimension is the batch; -1 is a dimension of variable size
    """

    name: str
    datatype: str
    shape: list[int]

    @field_validator("datatype")
    @classmethod
    def _known_datatype(cls, datatype: str) -> str:
        if datatype not in DATATYPES:
            raise ValueError(f"not a datatype of the Open Inference Protocol; one of {', '.join(DATATYPES)}")
        return datatype

    @field_validator("shape")
    @classmethod
    def _sensible_shape(cls, shape: list[int]) -> list[int]:
        if not shape or any(size < 1 and size != -1 for size in shape):
            raise ValueError("a shape is a batch dimension and the rest; each is positive, or -1 for variable")
        return shape


class Signature(Spec):
    """The tensors that a model takes and gives, in order."""

    inputs: list[TensorSignature]
    outputs: list[TensorSignature]


class ModelFactory(Spec):
    """How to build the module that the weights are loaded into: `module:Class`, called with `kwargs`."""

    factory: str
    kwargs: dict[str, Any] = Field(default_factory=dict)

    def build(self) -> object:
        """Import the factory and call it. Raises ConfigError naming what is wrong."""
        field, remedy = "model.factory", "write it as module:Class, and make the module importable here"
        module_name, separator, path = self.factory.partition(":")
        if not (module_name and separator and path):
            raise ConfigError(field, self.factory, "is not of the form module:Class", remedy)
        try:
            found: Any = importlib.import_module(module_name)
        except ImportError as error:
            raise ConfigError(field, self.factory, f"cannot be imported ({error})", remedy) from error
        for part in path.split("."):
            if not hasattr(found, part):
                raise ConfigError(field, self.factory, f"{module_name!r} has no {path!r}", remedy)
            found = getattr(found, part)
        if not callable(found):
            raise ConfigError(field, self.factory, "is not a class or function", remedy)
        try:
            return found(**self.kwargs)
        except (TypeError, ValueError) as error:
            raise ConfigError("model.kwargs", self.kwargs, f"{self.factory} refused them ({error})") from error


class Manifest(Spec):
    """Everything about one version but its weights.

    version:         of the model, in the registry, from 1
    created_at:      seconds since the epoch at which it was registered
    run_id:          the run that made it; None when no run did
    weights_version: the version that the weights had within that run
    sha256:          hex digest of weights.safetensors
    data:            fingerprints of the datasets that it was made with, by their part: train, validation, test
    """

    model_config = ConfigDict(ser_json_inf_nan="strings")  # a metric may be NaN, which JSON cannot say

    name: str
    version: int = Field(ge=1)
    created_at: float = Field(default_factory=time.time)
    run_id: str | None = None
    weights_version: int = Field(ge=0)
    sha256: str
    size_bytes: int = Field(ge=0)
    model: ModelFactory
    signature: Signature
    metrics: dict[str, float] = Field(default_factory=dict)
    data: dict[str, str] = Field(default_factory=dict)
