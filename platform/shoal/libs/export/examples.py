"""Example requests of an export: generated from the model's signature, and read from the user's files.

The registered model and the exported one answer them, and their answers are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shoal.errors import ConfigError, InferenceError, summarize_error
from shoal.extend.registry import ModelVersion, Signature
from shoal.extend.serve import DEFAULT_VARIABLE_SIZE, BatchLayout, HttpCodec, ModelOptions, make_example
from shoal.libs.export.runtime.model import ModelDescription, measure_difference
from shoal.open_inference.datatypes import NUMPY_DTYPES
from shoal.open_inference.json_tensors import to_json
from shoal.weights import WeightSnapshot

# Rows, and the size of variable dimensions: what a conversion fixes by mistake shows in one of them.
SIZES = ((1, DEFAULT_VARIABLE_SIZE), (2, DEFAULT_VARIABLE_SIZE), (3, 7))


@dataclass(frozen=True)
class Example:
    """A request. `file`: the user's; "" of a generated one."""

    inputs: dict[str, np.ndarray]
    num_rows: int
    body: bytes
    file: str = ""


Predict = Callable[[Example], dict[str, np.ndarray]]


def generate_examples(signature: Signature, layout: BatchLayout, max_rows: int) -> list[Example]:
    """Generate an example of each of `SIZES`, in the model's shapes. Floats are random, and short in JSON."""
    generator, examples = np.random.default_rng(0), []
    for num_rows, variable_size in SIZES:
        num_rows = min(num_rows, max_rows)
        inputs = layout.to_model_shapes(make_example(layout.signature.inputs, num_rows, variable_size))
        for spec in signature.inputs:
            if NUMPY_DTYPES[spec.datatype].kind == "f":
                drawn = generator.integers(-16, 17, inputs[spec.name].shape) / 8
                inputs[spec.name] = drawn.astype(NUMPY_DTYPES[spec.datatype])
        tensors: list[dict[str, Any]] = [
            {
                "name": spec.name,
                "shape": list(inputs[spec.name].shape),
                "datatype": spec.datatype,
                "data": to_json(spec.name, spec.datatype, inputs[spec.name], "input"),
            }
            for spec in signature.inputs
        ]
        examples.append(Example(inputs, num_rows, msgspec.json.encode({"inputs": tensors})))
    return examples


def read_examples(files: list[str], description: ModelDescription) -> list[Example]:
    """Read the bodies of inferences. Raises ConfigError."""
    codec = HttpCodec(
        description.name, description.inputs, description.outputs, description.max_batch_size, description.batch_dim
    )
    examples = []
    for file in files:
        try:
            body = Path(file).read_bytes()
            request = codec.decode(body)
        except (OSError, InferenceError) as error:
            remedy = 'give a file of JSON, as {"inputs": [{"name": ..., "shape": ..., "datatype": ..., "data": ...}]}'
            raise ConfigError("examples", file, str(error), remedy) from error
        if request.binary or any(request.binary_of.values()):
            raise ConfigError("examples", file, "asks for binary outputs", "leave that out: answers are stored as JSON")
        examples.append(Example(dict(request.inputs), request.num_rows, body, file))
    return examples


def load_registered(version: ModelVersion, snapshot: WeightSnapshot, options: ModelOptions) -> Predict:
    """Load the registered model as an endpoint does, in torch. Raises ConfigError, WeightsError."""
    from shoal.extend.serve import Predictor

    predictor = Predictor(version.manifest.model, version.manifest.signature, options)
    loaded, layout = predictor.load(snapshot), predictor.layout

    def predict(example: Example) -> dict[str, np.ndarray]:
        (answer,) = loaded.predict_batch([layout.to_batch_first(example.inputs, example.num_rows)])
        return layout.to_model_shapes(answer)

    return predict


def select_answered(examples: Sequence[Example], predict: Predict, ref: str) -> list[Example]:
    """Select the examples that the model answers: all of the user's. Raises ConfigError."""
    answered, reason = [], ""
    for example in examples:
        try:
            predict(example)
            answered.append(example)
        except Exception as error:  # of the model, on what may be unlike its requests
            reason = summarize_error(error)
            if example.file:
                raise ConfigError("examples", example.file, f"{ref} does not answer it: {reason}") from error
    if not answered:
        remedy = "give a request that it answers with --example FILE"
        raise ConfigError("model", ref, f"does not answer examples generated from its signature: {reason}", remedy)
    return answered


def compare_answers(
    examples: Sequence[Example], registered: Predict, exported: Predict, tolerance: float, ref: str
) -> float:
    """The largest difference of their answers, relative. Raises ConfigError beyond the tolerance."""
    largest = 0.0
    for example in examples:
        what = example.file or f"a generated example of {example.num_rows} rows"
        try:
            difference = measure_difference(registered(example), exported(example))
        except Exception as error:  # of onnxruntime, whose errors have no common base
            problem = f"the exported model does not answer {what}: {summarize_error(error)}"
            raise ConfigError("model", ref, problem, "neither branch on sizes nor on values in forward") from error
        if not difference <= tolerance:
            remedy = "neither branch on values or sizes nor draw random numbers in forward, or set a larger tolerance"
            problem = f"the exported model's answer to {what} differs by {difference:g} from the registered one's"
            raise ConfigError("tolerance", tolerance, problem, remedy)
        largest = max(largest, difference)
    return largest
