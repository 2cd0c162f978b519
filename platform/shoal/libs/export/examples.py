"""Example requests of an export: generated from the model's signature, and read from the user's files.

The registered model and the exported one answer them, and their answers are compared. Pure but for reading the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shoal.errors import ConfigError, InferenceError
from shoal.libs.export.runtime.model import ModelDescription
from shoal.open_inference.datatypes import NUMPY_DTYPES
from shoal.open_inference.json_tensors import to_json
from shoal.registry import Signature
from shoal.serve.http.codec import HttpCodec
from shoal.serve.model.warm_up import DEFAULT_VARIABLE_SIZE, make_example
from shoal.serve.spec.batch_layout import BatchLayout

# Rows, and the size of variable dimensions: what a conversion fixes by mistake shows in one of them.
SIZES = ((1, DEFAULT_VARIABLE_SIZE), (2, DEFAULT_VARIABLE_SIZE), (3, 7))


@dataclass(frozen=True)
class Example:
    """A request. `file`: the user's; "" of a generated one."""

    inputs: dict[str, np.ndarray]
    num_rows: int
    body: bytes
    file: str = ""


def generate_examples(signature: Signature, layout: BatchLayout, max_rows: int) -> list[Example]:
    """Generate an example of each of `SIZES`, in the model's shapes. Floats are random, and short in JSON."""
    generator, found = np.random.default_rng(0), []
    for num_rows, variable_size in SIZES:
        num_rows = min(num_rows, max_rows)
        inputs = layout.to_model_shapes(make_example(layout.signature, num_rows, variable_size))
        for spec in signature.inputs:
            if NUMPY_DTYPES[spec.datatype].kind == "f":
                drawn = generator.integers(-16, 17, inputs[spec.name].shape) / 8
                inputs[spec.name] = drawn.astype(NUMPY_DTYPES[spec.datatype])
        found.append(Example(inputs, num_rows, _encode(signature, inputs)))
    return found


def read_examples(files: list[str], description: ModelDescription) -> list[Example]:
    """Read the bodies of inferences. Raises ConfigError."""
    codec = HttpCodec(
        description.name,
        description.inputs,
        description.outputs,
        description.max_batch_size,
        description.batch_dim,
    )
    found = []
    for file in files:
        try:
            body = Path(file).read_bytes()
            request = codec.decode(body)
        except (OSError, InferenceError) as error:
            remedy = 'give a file of JSON, as {"inputs": [{"name": ..., "shape": ..., "datatype": ..., "data": ...}]}'
            raise ConfigError("examples", file, str(error), remedy) from error
        if request.binary or any(request.binary_of.values()):
            raise ConfigError("examples", file, "asks for binary outputs", "leave that out: answers are stored as JSON")
        found.append(Example(dict(request.inputs), request.num_rows, body, file))
    return found


def _encode(signature: Signature, inputs: dict[str, np.ndarray]) -> bytes:
    tensors: list[dict[str, Any]] = [
        {
            "name": spec.name,
            "shape": list(inputs[spec.name].shape),
            "datatype": spec.datatype,
            "data": to_json(spec.name, spec.datatype, inputs[spec.name], "input"),
        }
        for spec in signature.inputs
    ]
    return msgspec.json.encode({"inputs": tensors})
