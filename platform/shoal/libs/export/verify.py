"""Compares an exported model with the registered one, on examples that both answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shoal.errors import ConfigError, summarize_error
from shoal.libs.export.examples import Example
from shoal.libs.export.runtime.model import FolderModel, measure_difference
from shoal.registry import ModelVersion
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

Predict = Callable[[Example], dict[str, np.ndarray]]


def load_registered(found: ModelVersion, snapshot: WeightSnapshot, options: ModelOptions) -> Predict:
    """Load the registered model as an endpoint does, in torch. Raises ConfigError, WeightsError."""
    from shoal.serve.model.predictor import Predictor

    predictor = Predictor(found.manifest.model, found.manifest.signature, options)
    loaded, layout = predictor.load(snapshot), predictor.layout

    def predict(example: Example) -> dict[str, np.ndarray]:
        (answer,) = loaded.predict_batch([layout.to_batch_first(example.inputs, example.num_rows)])
        return layout.to_model_shapes(answer)

    return predict


def bind_exported(model: FolderModel) -> Predict:
    """The exported model as a function of examples."""
    return lambda example: model.predict(example.inputs, example.num_rows)


def select_answered(examples: Sequence[Example], predict: Predict, ref: str) -> list[Example]:
    """Select the examples that the model answers: all of the user's. Raises ConfigError."""
    found, reason = [], ""
    for example in examples:
        try:
            predict(example)
            found.append(example)
        except Exception as error:  # of the model, on what may be unlike its requests
            reason = summarize_error(error)
            if example.file:
                raise ConfigError("examples", example.file, f"{ref} does not answer it: {reason}") from error
    if not found:
        remedy = "give a request that it answers with --example FILE"
        raise ConfigError("model", ref, f"does not answer examples generated from its signature: {reason}", remedy)
    return found


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
